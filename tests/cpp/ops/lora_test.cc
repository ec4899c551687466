#include "ops/lora.h"

#include <cmath>
#include <cstring>
#include <deque>
#include <random>

#include "base/int_math.h"
#include "cpp/ops/op_test_util.h"
#include "ops/linear.h"
#include "tensor/tensor_view.h"

namespace allspark {
namespace {

using testing::ExpectCheck;
using testing::OpDevice;

constexpr int64_t kInputs = 70, kOut = 200, kMaxRank = 48;

// A float32 adapter of a weight [kOut, kInputs]: two modules that both begin within a panel, with a
// gap between them.
struct Adapter {
  std::vector<float> a, first_b, second_b;
  LoraWeight weight;

  Adapter(int64_t first_rank, int64_t second_rank, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    const int64_t rank = first_rank + second_rank;
    a.resize(static_cast<size_t>(AlignUp(rank, kernels::kNarrowPanelColumns) * kInputs));
    for (int64_t r = 0; r < rank; ++r) {
      for (int64_t k = 0; k < kInputs; ++k) *A(r, k) = normal(random);
    }
    weight = {a.data(), DType::kFloat32, rank, kInputs, {}, nullptr};
    const auto add = [&](int64_t column, int64_t n, int64_t begin, int64_t count,
                         std::vector<float>& b) {
      const int64_t first = column / 64, end = CeilDiv(column + n, 64);
      b.resize(static_cast<size_t>((end - first) * 64 * count));
      weight.parts.push_back({first, end, begin, count, b.data()});
      for (int64_t i = column; i < column + n; ++i) {
        for (int64_t r = 0; r < count; ++r) b[At(weight.parts.back(), i, r)] = normal(random);
      }
    };
    add(3, 100, 0, first_rank, first_b);
    add(120, kOut - 120, first_rank, second_rank, second_b);
  }

  float* A(int64_t r, int64_t k) {
    const int64_t width = kernels::kNarrowPanelColumns;
    return &a[static_cast<size_t>((r / width * kInputs + k) * width + r % width)];
  }
  static size_t At(const LoraPart& part, int64_t column, int64_t r) {
    return static_cast<size_t>(((column / 64 - part.panel_begin) * part.rank + r) * 64 +
                               column % 64);
  }
  // `w`, whose matrices are this adapter's, on a device.
  LoraWeight Put(OpDevice& device, LoraWeight w) const {
    w.a = device.Put(a);
    w.parts[0].b = device.Put(first_b);
    w.parts[1].b = device.Put(second_b);
    return w;
  }
  // The adapter's sum for element `column`, and the sum of the terms' magnitudes.
  std::pair<double, double> Delta(const float* x, int64_t column) {
    double sum = 0, magnitude = 0;
    for (const LoraPart& part : weight.parts) {
      if (column / 64 < part.panel_begin || column / 64 >= part.panel_end) continue;
      for (int64_t r = 0; r < part.rank; ++r) {
        const double b =
            static_cast<double>(static_cast<const float*>(part.b)[At(part, column, r)]);
        for (int64_t k = 0; k < kInputs; ++k) {
          const double term =
              b * static_cast<double>(*A(part.rank_begin + r, k)) * static_cast<double>(x[k]);
          sum += term;
          magnitude += std::abs(term);
        }
      }
    }
    return {sum, magnitude};
  }
};

// A Linear over a batch of rows, some with adapters, with the best available kernels. The weight is
// zero, so that only the adapters change y.
class LoraOpTest : public ::testing::Test {
 protected:
  LoraOpTest() : x_(static_cast<size_t>(kRows * kInputs)), y_(static_cast<size_t>(kRows * kOut)) {
    std::mt19937_64 random(3);
    std::normal_distribution<float> normal;
    for (float& value : x_) value = normal(random);
    for (float& value : y_) value = normal(random);
  }
  std::vector<LoraRows> Rows() {
    return {{2, 1, &one_.weight}, {3, 70, &other_.weight}, {80, 33, &one_.weight}};
  }
  std::vector<float> Run(int threads, std::vector<LoraRows> rows) {
    OpDevice device(*kernels::DefaultTable(), threads);
    const OpContext& context = device.context();
    std::deque<LoraWeight> weights;
    for (LoraRows& range : rows) {
      const Adapter& adapter = range.weight->a == one_.a.data() ? one_ : other_;
      range.weight = &weights.emplace_back(adapter.Put(device, *range.weight));
    }
    const Matrix sums = device.Floats(sums_, kRows, kMaxRank);
    std::vector<kernels::LowRank> low_rank;
    low_rank.reserve(2 * rows.size());
    const Matrix x = device.Floats(x_, kRows, kInputs);
    ShrinkLora(context, x, rows, {sums, {}}, low_rank);
    std::vector<float> y = y_;
    const LinearWeight zero{device.Put(zeros_), DType::kFloat32, kOut, kInputs, nullptr};
    Linear(context, x, zero, /*accumulate=*/true, device.Floats(y, kRows, kOut), low_rank);
    return device.Fetch(y);
  }

  static constexpr int64_t kRows = 120;
  Adapter one_{5, 16, 1}, other_{1, 40, 2};
  std::vector<float> x_, y_;
  const std::vector<float> zeros_ = std::vector<float>(256 * kInputs);
  std::vector<float> sums_ = std::vector<float>(kRows * kMaxRank);
};

TEST_F(LoraOpTest, AddsToTheRowsAndColumnsOfEachAdapter) {
  const std::vector<float> y = Run(2, Rows());
  for (int64_t row = 0; row < kRows; ++row) {
    Adapter* adapter = row == 2 || (row >= 80 && row < 113) ? &one_ : &other_;
    const bool adapted = (row >= 2 && row < 73) || (row >= 80 && row < 113);
    for (int64_t i = 0; i < kOut; ++i) {
      const auto at = static_cast<size_t>(row * kOut + i);
      const auto [delta, magnitude] =
          adapted ? adapter->Delta(&x_[static_cast<size_t>(row * kInputs)], i)
                  : std::pair<double, double>{0, 0};
      const double expected = static_cast<double>(y_[at]) + delta;
      // Two chains of products, one after the other.
      const double bound = 0x1p-24 * (kInputs + kMaxRank + 2) * (magnitude + std::abs(expected));
      ASSERT_NEAR(static_cast<double>(y[at]), expected, adapted ? bound : 0.0)
          << "row " << row << " column " << i;
    }
  }
}

TEST_F(LoraOpTest, ARowDependsOnNoOther) {
  const std::vector<float> together = Run(1, Rows());
  EXPECT_EQ(Run(3, Rows()), together);
  for (const LoraRows& range : Rows()) {
    for (int64_t i = 0; i < range.num_rows; i += 11) {
      const int64_t row = range.row_begin + i;
      const std::vector<float> alone = Run(2, {{row, 1, range.weight}});
      EXPECT_EQ(std::memcmp(&alone[static_cast<size_t>(row * kOut)],
                            &together[static_cast<size_t>(row * kOut)], kOut * sizeof(float)),
                0)
          << "row " << row;
    }
  }
}

TEST_F(LoraOpTest, NoRowsIsNoWork) { EXPECT_EQ(Run(1, {}), y_); }

TEST_F(LoraOpTest, RefusesWhatDoesNotFit) {
  ExpectCheck([&] { Run(1, {{119, 2, &one_.weight}}); }, "rows [119, +2) of 120");
  LoraWeight weight = one_.weight;
  weight.k = 69;
  ExpectCheck([&] { Run(1, {{0, 1, &weight}}); }, "x has 70 columns; the adapter reads 69");
  weight = one_.weight;
  weight.rank = kMaxRank + 1;
  ExpectCheck([&] { Run(1, {{0, 1, &weight}}); }, "rank 49");
  weight = one_.weight;
  weight.parts[1].rank = 17;
  ExpectCheck([&] { Run(1, {{0, 1, &weight}}); }, "elements [5, +17) of 21");
  weight = one_.weight;
  weight.dtype = DType::kBFloat16;
  ExpectCheck([&] { Run(1, {{0, 1, &weight}}); }, "rows of rank 21 in bfloat16; there is room");
  OpDevice device(*kernels::DefaultTable(), 1);
  const LinearWeight zero{device.Put(zeros_), DType::kFloat32, kOut, kInputs, nullptr};
  const std::vector<kernels::LowRank> low_rank = {
      {0, 2, 0, 5, device.Put(sums_), kMaxRank, zero.data, 4, DType::kFloat32}};
  std::vector<float> y = y_;
  ExpectCheck(
      [&] {
        Linear(device.context(), device.Floats(x_, kRows, kInputs), zero, false,
               device.Floats(y, kRows, kOut), low_rank);
      },
      "panels [0, 5) of 4");
}

// Row ids[i] of a, times b. Sums of small integers are exact.
TEST(LoraEmbeddingTest, AddsTheRowOfEachId) {
  constexpr int64_t kTokens = 90, kIds = 50, kRank = 8, kWidth = 128;
  const auto values = [](int64_t count, size_t step) {
    std::vector<float> x(static_cast<size_t>(count));
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * step % 17);
    return x;
  };
  const std::vector<float> a = values(kIds * kRank, 5), b = values(kWidth * kRank, 7);
  const std::vector<float> before = values(kTokens * kWidth, 3);
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < kTokens; ++i) ids.push_back(i * 7 % kIds);
  for (const int threads : {1, 3}) {
    OpDevice device(*kernels::DefaultTable(), threads);
    const LoraWeight weight{
        device.Put(a), DType::kFloat32, kRank, kIds, {{0, kWidth / 64, 0, kRank, device.Put(b)}}};
    std::vector<LoraRows> rows = {{1, 1, &weight}, {5, 80, &weight}};
    std::vector<float> low(kTokens * kRank), y = before;
    const Matrix sums = device.Floats(low, kTokens, kRank);
    AddLoraEmbedding(device.context(), device.Put(ids), rows, {sums, {}},
                     device.Floats(y, kTokens, kWidth));
    device.Fetch(y);
    for (int64_t t = 0; t < kTokens; ++t) {
      const bool adapted = t == 1 || (t >= 5 && t < 85);
      for (int64_t i = 0; i < kWidth; ++i) {
        float expected = before[static_cast<size_t>(t * kWidth + i)];
        for (int64_t r = 0; adapted && r < kRank; ++r) {
          expected += a[static_cast<size_t>(ids[static_cast<size_t>(t)] * kRank + r)] *
                      b[static_cast<size_t>((i / 64 * kRank + r) * 64 + i % 64)];
        }
        ASSERT_EQ(y[static_cast<size_t>(t * kWidth + i)], expected) << t << ", " << i;
      }
    }
  }
}

}  // namespace
}  // namespace allspark
