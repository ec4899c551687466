#include "ops/linear.h"

#include <atomic>
#include <tuple>

#include "base/int_math.h"
#include "cpp/ops/op_test_util.h"
#include "ops/cpu/linear_split.h"
#include "ops/gated_act.h"
#include "ops/linear_each.h"
#include "tensor/tensor_view.h"

namespace allspark {
namespace {

using testing::ExpectCheck;
using testing::kFloatSlot;
using testing::OpDevice;

std::atomic<int> num_calls;

// Adds 1 and the row's first input to each output element of its range. So the test sees a row,
// panel or strip that is computed twice, not at all, or from the wrong row.
void CountingGemm(const kernels::GemmArgs& args) noexcept {
  ++num_calls;
  const float* a = static_cast<const float*>(args.a);
  const int64_t strip_end = args.strip_begin + args.strip_columns;
  for (int64_t m = 0; m < args.m; ++m) {
    for (int64_t n = args.panel_begin * 64; n < std::min(args.n, args.panel_end * 64); ++n) {
      if (n % 64 < args.strip_begin || n % 64 >= strip_end) continue;
      args.c[m * args.ldc + n] +=
          1.0f + a[m * args.lda] + (args.bias != nullptr ? args.bias[n] : 0.0f);
    }
  }
}

class LinearTest : public ::testing::Test {
 protected:
  LinearTest() { table_.gemm[kFloatSlot][kFloatSlot] = CountingGemm; }

  kernels::KernelTable table_;
};

class LinearSplitTest : public LinearTest,
                        public ::testing::WithParamInterface<std::tuple<int, int, int>> {};

TEST_P(LinearSplitTest, EveryElementIsMadeOnce) {
  const auto [threads, rows, n] = GetParam();
  OpDevice device(table_, threads);
  const int64_t k = 2048;  // Enough work to be split.
  const int64_t ldx = k + 3;
  const int64_t ldy = n + 5;
  std::vector<float> x(static_cast<size_t>(rows * ldx));
  for (int64_t r = 0; r < rows; ++r) x[static_cast<size_t>(r * ldx)] = static_cast<float>(r);
  std::vector<float> bias(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) bias[static_cast<size_t>(i)] = static_cast<float>(1000 * i);
  std::vector<float> y(static_cast<size_t>(rows * ldy));
  std::vector<float> w(1);
  const LinearWeight weight{device.Put(w), DType::kFloat32, n, k, device.Put(bias)};
  Linear(device.context(), device.Floats(x, rows, k, ldx), weight, true,
         device.Floats(y, rows, n, ldy));
  device.Fetch(y);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < ldy; ++i) {
      const float expected = i < n ? static_cast<float>(1 + r + 1000 * i) : 0.0f;
      ASSERT_EQ(y[static_cast<size_t>(r * ldy + i)], expected) << "row " << r << " column " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LinearSplitTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 5, 16),
                                            ::testing::Values(1, 7, 16, 33, 64, 100, 300),
                                            ::testing::Values(1, 63, 64, 65, 200, 896)));

TEST(SplitLinearTest, UsesTheThreadsAndCutsManyRows) {
  constexpr int64_t kLocalRows = 128;
  EXPECT_EQ(cpu::SplitLinear(1, 14, 2, kLocalRows).panel_parts, 2);
  EXPECT_EQ(cpu::SplitLinear(1, 14, 2, kLocalRows).row_parts, 1);
  EXPECT_EQ(cpu::SplitLinear(128, 14, 2, kLocalRows).row_parts, 1);
  EXPECT_EQ(cpu::SplitLinear(256, 14, 2, kLocalRows).row_parts, 2);
  EXPECT_EQ(cpu::SplitLinear(256, 14, 2, /*local_rows=*/1 << 20).panel_parts, 2);
  // Many rows per part, but one thread would have a quarter more rows than the other.
  EXPECT_EQ(cpu::SplitLinear(288, 14, 2, kLocalRows).row_parts, 1);
  EXPECT_EQ(cpu::SplitLinear(512, 14, 8, kLocalRows).row_parts, 4);
  // One panel keeps one thread busy; the rows keep the others.
  EXPECT_EQ(cpu::SplitLinear(1024, 1, 8, kLocalRows).row_parts, 8);
  EXPECT_EQ(cpu::SplitLinear(1, 1, 8, kLocalRows).row_parts, 1);
  for (int64_t threads = 1; threads <= 17; ++threads) {
    for (const int64_t rows : {1, 31, 32, 33, 64, 500}) {
      for (const int64_t panels : {1, 2, 3, 14, 2374}) {
        const cpu::LinearSplit split = cpu::SplitLinear(rows, panels, threads, kLocalRows);
        EXPECT_LE(split.row_parts * split.panel_parts, threads);
        EXPECT_GE(split.row_parts, 1);
        EXPECT_GE(split.panel_parts, 1);
        EXPECT_LE(split.panel_parts, panels);
      }
    }
  }
}

TEST(SplitLinearTest, FewRowsAreCutIntoStripsOfPanels) {
  constexpr int64_t kLocalRows = 128;
  const auto split = [&](int64_t panels, int64_t threads) {
    return cpu::SplitLinear(1, panels, threads, kLocalRows, /*may_strip=*/true);
  };
  EXPECT_EQ(split(14, 2).strips, 1);
  EXPECT_EQ(split(18, 15).strips, 1);  // too few threads
  EXPECT_EQ(split(14, 64).strips, 4);
  EXPECT_EQ(split(14, 64).panel_parts, 56);
  EXPECT_EQ(split(18, 16).panel_parts, 16);
  EXPECT_EQ(split(2374, 64).strips, 1);  // a fiftieth is not worth it
  EXPECT_EQ(cpu::SplitLinear(1, 14, 64, kLocalRows).strips, 1);
  EXPECT_TRUE(cpu::MayStrip(kernels::kMostStripRows, {}));
  EXPECT_FALSE(cpu::MayStrip(kernels::kMostStripRows + 1, {}));
  const kernels::LowRank adapter{};
  EXPECT_FALSE(cpu::MayStrip(1, {&adapter, 1}));
}

TEST(SplitLinearTest, StripsOfARangeAreWholePanelsAndTheRest) {
  for (const int64_t per_panel : {1, 2, 4}) {
    const int64_t width = 64 / per_panel;
    for (int64_t begin = 0; begin < 13; ++begin) {
      for (int64_t end = begin; end < 13; ++end) {
        int64_t at = begin * width, calls = 0;
        cpu::ForEachStrip({begin, end}, per_panel, 13 * width, [&](const cpu::Strip& strip) {
          const auto& [panels, first, columns] = strip;
          EXPECT_EQ(panels.begin * 64 + first, at);
          EXPECT_TRUE(columns == 64 || panels.end == panels.begin + 1);
          at += (panels.end - panels.begin - 1) * 64 + columns;
          ++calls;
        });
        EXPECT_EQ(at, end * width);
        EXPECT_LE(calls, 3);
      }
    }
  }
}

// The part of the time for which threads read weights, of one token of the 0.5B shape, if all read
// as fast: each waits at the end of every product for the slowest.
TEST(SplitLinearTest, ManyThreadsHaveEqualParts) {
  struct Weight {
    int64_t panels, k, times;
  };
  const Weight weights[] = {
      {18, 896, 24}, {14, 896, 24}, {2 * 76, 896, 24}, {14, 4864, 24}, {2374, 896, 1}};
  const auto used = [&](int64_t threads, bool may_strip) {
    double work = 0, time = 0;
    for (const Weight& w : weights) {
      const bool gated = w.panels == 2 * 76;
      const int64_t panels = gated ? 76 : w.panels, each = w.k * w.times * (gated ? 2 : 1);
      const cpu::LinearSplit split = cpu::SplitLinear(1, panels, threads, 128, may_strip);
      const int64_t strips = panels * split.strips;
      work += static_cast<double>(panels * each);
      time += static_cast<double>(CeilDiv(strips, split.panel_parts) * each) /
              static_cast<double>(split.strips);
    }
    return work / (time * static_cast<double>(threads));
  };
  EXPECT_GE(used(2, true), 0.99);
  for (const int64_t threads : {8, 16, 32, 64}) EXPECT_GE(used(threads, true), 0.9) << threads;
  EXPECT_LT(used(64, false), 0.45);
}

TEST_F(LinearTest, SmallWorkRunsOnTheCaller) {
  OpDevice device(table_, 2);
  std::vector<float> x(64), y(128), w(1);
  num_calls = 0;
  Linear(device.context(), device.Floats(x, 1, 64),
         {device.Put(w), DType::kFloat32, 128, 64, nullptr}, false, device.Floats(y, 1, 128));
  device.Fetch(y);
  EXPECT_EQ(num_calls, 1);
}

TEST_F(LinearTest, RefusesWhatDoesNotFit) {
  OpDevice device(table_, 1);
  std::vector<float> x(8), y(8), w(8);
  const LinearWeight weight{device.Put(w), DType::kFloat32, 4, 4, nullptr};
  const auto run = [&](ConstMatrix a, LinearWeight b, Matrix c) {
    Linear(device.context(), a, b, false, c);
  };
  ExpectCheck([&] { run(device.Floats(x, 2, 3), weight, device.Floats(y, 2, 4)); },
              "x has 3 columns; the weight reads 4");
  ExpectCheck([&] { run(device.Floats(x, 2, 4), weight, device.Floats(y, 2, 3)); },
              "y has 3 columns; the weight makes 4");
  ExpectCheck([&] { run(device.Floats(x, 2, 4), weight, device.Floats(y, 1, 4)); },
              "x has 2 rows, y has 1");
  ExpectCheck(
      [&] { run({device.Put(x), DType::kFloat32, 2, 4, 3}, weight, device.Floats(y, 2, 4)); },
      "row stride 3");
  ExpectCheck([&] { run({nullptr, DType::kFloat32, 2, 4, 4}, weight, device.Floats(y, 2, 4)); },
              "x has no data");
  ExpectCheck(
      [&] {
        run(device.Floats(x, 2, 4), {device.Put(w), DType::kBFloat16, 4, 4, nullptr},
            device.Floats(y, 2, 4));
      },
      "no gemm for bfloat16 weights and float32 activations");
  ExpectCheck(
      [&] {
        run({device.Put(x), DType::kBFloat16, 2, 3, 3},
            {device.Put(w), DType::kBFloat16, 4, 3, nullptr}, device.Floats(y, 2, 4));
      },
      "k is 3");
  ExpectCheck(
      [&] {
        run(device.Floats(x, 2, 4), {nullptr, DType::kFloat32, 4, 4}, device.Floats(y, 2, 4));
      },
      "the weight is [4, 4]");
  ExpectCheck(
      [&] { run(device.Floats(x, 2, 4), weight, {device.Put(y), DType::kBFloat16, 2, 4, 4}); },
      "y is bfloat16; expected float32");
}

TEST_F(LinearTest, NoRowsIsNoWork) {
  OpDevice device(table_, 1);
  std::vector<float> w(1);
  num_calls = 0;
  Linear(device.context(), {nullptr, DType::kFloat32, 0, 4, 4},
         {device.Put(w), DType::kFloat32, 4, 4, nullptr}, false,
         {nullptr, DType::kFloat32, 0, 4, 4});
  device.Fetch(w);  // An op that waited would have run.
  EXPECT_EQ(num_calls, 0);
}

// LinearGated and LinearActivated against Linear and the activation: whole panels or not, with a
// gated kernel or without.
class LinearGatedTest : public ::testing::TestWithParam<std::tuple<int, int, int>> {
 protected:
  static constexpr int64_t kDepth = 130;
};

TEST_P(LinearGatedTest, GivesTheBitsOfLinearAndActivation) {
  const int threads = std::get<0>(GetParam());
  const int64_t rows = std::get<1>(GetParam()), cols = std::get<2>(GetParam());
  const auto values = [](int64_t count) {
    std::vector<float> x(static_cast<size_t>(count));
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7919 % 1009) / 504.5f - 1;
    return x;
  };
  std::vector<float> x = values(rows * kDepth), bias = values(2 * cols);
  const std::vector<float> w = values((2 * cols + 63) / 64 * 64 * kDepth);
  const auto act = kernels::Activation::kGeluTanh;
  for (const kernels::KernelTable* table : kernels::AvailableTables()) {
    SCOPED_TRACE(table->name);
    OpDevice device(*table, threads, /*scratch_floats=*/cols);
    const OpContext& context = device.context();
    const LinearWeight weight{device.Put(w), DType::kFloat32, 2 * cols, kDepth, device.Put(bias)};
    const LinearWeight up{device.Put(w), DType::kFloat32, cols, kDepth, device.Put(bias)};
    const ConstMatrix in = device.Floats(x, rows, kDepth);
    const auto run = [&](bool fused, bool gated, DType dtype) {
      std::vector<float> scratch(static_cast<size_t>(rows * 2 * cols));
      std::vector<unsigned char> y(static_cast<size_t>(rows * cols * ElementBytes(dtype)));
      std::vector<float> scale(static_cast<size_t>(rows));
      std::vector<int32_t> row_sums(static_cast<size_t>(rows * kernels::RowSums(cols)));
      const Matrix out{device.Put(y),       dtype, rows, cols, cols, device.Put(scale),
                       device.Put(row_sums)};
      const Matrix sums = device.Floats(scratch, rows, gated ? 2 * cols : cols);
      if (fused) {
        (gated ? LinearGated : LinearActivated)(context, in, gated ? weight : up, act, sums, out,
                                                {});
      } else {
        Linear(context, in, gated ? weight : up, false, sums);
        (gated ? GatedAct : Activate)(context, act, sums, out);
      }
      return std::make_tuple(device.Fetch(y), device.Fetch(scale), device.Fetch(row_sums));
    };
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt8}) {
      for (const bool gated : {true, false}) {
        EXPECT_EQ(run(true, gated, dtype), run(false, gated, dtype))
            << DTypeName(dtype) << (gated ? " gated" : " without a gate");
      }
    }
  }
}

// Strips have the bits of whole panels, in one product and in several.
TEST(LinearBitsTest, ManyThreadsGiveTheBitsOfOne) {
  constexpr int64_t kDepth = 2048, kColumns = 200;
  std::vector<float> w(256 * kDepth);
  for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(i * 7919 % 1009) / 504.5f - 1;
  for (const kernels::KernelTable* table : kernels::AvailableTables()) {
    SCOPED_TRACE(table->name);
    for (const int64_t rows : {1, 16}) {
      std::vector<float> x(w.begin() + 5, w.begin() + 5 + rows * kDepth);
      const auto run = [&](int threads) {
        OpDevice device(*table, threads);
        const LinearWeight weight{device.Put(w), DType::kFloat32, kColumns, kDepth, nullptr};
        std::vector<float> y[3];
        for (auto& each : y) each.resize(static_cast<size_t>(rows * kColumns));
        const ConstMatrix in = device.Floats(x, rows, kDepth);
        Linear(device.context(), in, weight, false, device.Floats(y[0], rows, kColumns));
        const LinearTask tasks[] = {{in, weight, device.Floats(y[1], rows, kColumns)},
                                    {in, weight, device.Floats(y[2], rows, kColumns)}};
        LinearEach(device.context(), tasks);
        return std::make_tuple(device.Fetch(y[0]), device.Fetch(y[1]), device.Fetch(y[2]));
      };
      EXPECT_EQ(run(1), run(16)) << rows << " rows";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LinearGatedTest,
                         ::testing::Combine(::testing::Values(1, 3), ::testing::Values(1, 40, 200),
                                            ::testing::Values(64, 100, 192)));

TEST_F(LinearTest, RefusesAnOddWeightForGateAndUp) {
  OpDevice device(table_, 1);
  std::vector<float> x(8), y(8), scratch(16), w(64 * 4);
  const LinearWeight weight{device.Put(w), DType::kFloat32, 5, 4, nullptr};
  ExpectCheck(
      [&] {
        LinearGated(device.context(), device.Floats(x, 1, 4), weight, kernels::Activation::kSilu,
                    device.Floats(scratch, 1, 5), device.Floats(y, 1, 2));
      },
      "5 columns");
}

}  // namespace
}  // namespace allspark
