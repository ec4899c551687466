// The ops that split over rows: each must call its kernel once for every row, with any number of
// threads, and refuse operands that do not fit. The kernels here are stand-ins that record their
// calls.
#include <cmath>

#include "cpp/ops/op_test_util.h"
#include "ops/argmax.h"
#include "ops/convert.h"
#include "ops/embedding.h"
#include "ops/gated_act.h"
#include "ops/hadamard.h"
#include "ops/logn.h"
#include "ops/norm.h"
#include "ops/rope.h"
#include "ops/scale.h"

namespace allspark {
namespace {

using testing::ExpectCheck;
using testing::kFloatSlot;
using testing::OpDevice;
using testing::OpTest;

void TraceNorm(const kernels::NormArgs& args) noexcept {
  float* y = static_cast<float*>(args.y);
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t i = 0; i < args.cols; ++i) {
      y[r * args.ldy + i] = args.x[r * args.ldx + i] + args.weight[i] + args.eps;
    }
  }
}

void TraceLayerNorm(const kernels::NormArgs& args) noexcept {
  TraceNorm(args);
  float* y = static_cast<float*>(args.y);
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t i = 0; i < args.cols && args.bias != nullptr; ++i)
      y[r * args.ldy + i] += args.bias[i];
  }
}

void TraceEmbedding(const kernels::EmbeddingArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t i = 0; i < args.cols; ++i) {
      float& out = args.out[r * args.ldo + i];
      if (args.accumulate) out += 500.0f;
      out += static_cast<float>(args.ids[r] + (args.packed ? 1000 : 0));
    }
  }
}

void TraceRope(const kernels::RopeArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t i = 0; i < args.heads * args.head_dim; ++i) {
      args.x[r * args.ldx + i] += static_cast<float>(args.positions[r] + 1);
    }
  }
}

void TraceGatedAct(const kernels::GatedActArgs& args) noexcept {
  float* out = static_cast<float*>(args.out);
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t i = 0; i < args.cols; ++i) {
      const float up = args.gated ? args.x[r * args.ldx + args.cols + i] : 1.0f;
      out[r * args.ldo + i] += args.x[r * args.ldx + i] - up;
    }
  }
}

void TraceScale(const kernels::ScaleArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t i = 0; i < args.cols; ++i) {
      args.y[r * args.ldy + i] += args.x[r * args.ldx + i] * args.scale + args.soft_cap +
                                  args.limit + (args.accumulate ? 0.5f : 0.0f);
    }
  }
}

void TraceConvert(const kernels::ConvertArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t i = 0; i < args.cols; ++i) {
      static_cast<BFloat16*>(args.y)[r * args.ldy + i].bits =
          static_cast<uint16_t>(static_cast<const float*>(args.x)[r * args.ldx + i] / 10000.0f);
    }
  }
}

void TraceArgMax(const kernels::ArgMaxArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    args.index[r] += static_cast<int32_t>(args.x[r * args.ldx]);
  }
}

void TraceHadamard(const kernels::HadamardArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t i = 0; i < args.cols; ++i) {
      args.y[r * args.ldy + i] += args.x[r * args.ldx + i] + static_cast<float>(args.size);
    }
  }
}

class RowOpsTest : public OpTest {
 protected:
  RowOpsTest() : OpTest({}) {
    table_.name = "trace";
    table_.rms_norm[kFloatSlot] = TraceNorm;
    table_.layer_norm[kFloatSlot] = TraceLayerNorm;
    table_.embedding[kFloatSlot] = TraceEmbedding;
    table_.gated_act[kFloatSlot] = TraceGatedAct;
    table_.rope = TraceRope;
    table_.scale = TraceScale;
    table_.convert[kFloatSlot][static_cast<int>(DType::kBFloat16)] = TraceConvert;
    table_.argmax = TraceArgMax;
    table_.hadamard = TraceHadamard;
  }

  // rows x cols values: row * 10000 + column.
  static std::vector<float> Numbered(int64_t rows, int64_t ld) {
    std::vector<float> x(static_cast<size_t>(rows * ld));
    for (int64_t i = 0; i < rows * ld; ++i) {
      x[static_cast<size_t>(i)] = static_cast<float>(i / ld * 10000 + i % ld);
    }
    return x;
  }
};

constexpr int64_t kRows = 37;
constexpr int64_t kCols = 1024;  // A few rows are enough for a thread, so 37 are split.

TEST_P(RowOpsTest, Norm) {
  std::vector<float> x = Numbered(kRows, kCols + 1);
  std::vector<float> y(static_cast<size_t>(kRows * (kCols + 2)), -1.0f);
  std::vector<float> weight(kCols, 0.5f);
  Norm(context_, Floats(x, kRows, kCols, kCols + 1), {Put(weight), 0.25f},
       Floats(y, kRows, kCols, kCols + 2));
  Fetch(y);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < kCols + 2; ++i) {
      const float expected = i < kCols ? static_cast<float>(r * 10000 + i) + 0.75f : -1.0f;
      ASSERT_EQ(y[static_cast<size_t>(r * (kCols + 2) + i)], expected) << r << ", " << i;
    }
  }
}

TEST_P(RowOpsTest, LayerNorm) {
  std::vector<float> x = Numbered(kRows, kCols), y(x.size());
  std::vector<float> weight(kCols, 0.5f), bias(kCols, 2.0f);
  const Matrix from = Floats(x, kRows, kCols), to = Floats(y, kRows, kCols);
  for (const bool with_bias : {false, true}) {
    const float* added = with_bias ? Put(bias) : nullptr;
    const NormWeight norm{Put(weight), 0.25f, /*centered=*/true, added};
    Norm(context_, from, norm, to);
    Fetch(y);
    const float extra = with_bias ? 2.75f : 0.75f;
    for (int64_t i = 0; i < kRows * kCols; ++i) {
      ASSERT_EQ(y[static_cast<size_t>(i)], x[static_cast<size_t>(i)] + extra) << i;
    }
    const std::vector<int64_t> row = {kRows - 1};
    NormGather(context_, from, Put(row), norm, Floats(y, 1, kCols));
    ASSERT_EQ(Fetch(y)[3], static_cast<float>(row[0] * 10000 + 3) + extra);
  }
  ExpectCheck([&] { Norm(context_, from, {Put(weight), 0, false, Put(bias)}, to); },
              "rms_norm: it has no bias");
  table_.layer_norm[kFloatSlot] = nullptr;
  ExpectCheck([&] { Norm(context_, from, {Put(weight), 0, true}, to); }, "layer_norm");
}

TEST_P(RowOpsTest, Scale) {
  std::vector<float> x = Numbered(kRows, kCols + 1);
  std::vector<float> y(static_cast<size_t>(kRows * (kCols + 2)), 0.0f);
  const Matrix from = Floats(x, kRows, kCols, kCols + 1);
  const Matrix to = Floats(y, kRows, kCols, kCols + 2);
  Scale(context_, from, {2.0f, 0.25f, 4.0f}, /*accumulate=*/true, to);
  Fetch(y);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < kCols + 2; ++i) {
      const float expected = i < kCols ? static_cast<float>(2 * (r * 10000 + i)) + 4.75f : 0.0f;
      ASSERT_EQ(y[static_cast<size_t>(r * (kCols + 2) + i)], expected) << r << ", " << i;
    }
  }
  ExpectCheck([&] { Scale(context_, Floats(x, 3, kCols), {}, false, to); },
              "scale: x is [3, 1024], y is [37, 1024]");
  table_.scale = nullptr;
  ExpectCheck([&] { Scale(context_, from, {}, false, to); }, "scale");
}

TEST_P(RowOpsTest, LogN) {
  std::vector<float> x(static_cast<size_t>(kRows * kCols), 1.0f);
  std::vector<int32_t> positions;
  for (int32_t r = 0; r < int32_t{kRows}; ++r) positions.push_back(r * 3 % int32_t{kRows});
  LogN(context_, Put(positions), 16, Floats(x, kRows, kCols - 8, kCols));
  Fetch(x);
  for (int64_t r = 0; r < kRows; ++r) {
    const double length = positions[static_cast<size_t>(r)] + 1;
    const auto factor = static_cast<float>(std::log(length) / std::log(16.0));
    // The tracing kernel adds what it is to write.
    const float expected = length > 16 ? 1.0f + factor : 1.0f;
    ASSERT_EQ(x[static_cast<size_t>(r * kCols)], expected) << r;
    ASSERT_EQ(x[static_cast<size_t>(r * kCols + kCols - 9)], expected) << r;
    ASSERT_EQ(x[static_cast<size_t>(r * kCols + kCols - 8)], 1.0f) << r;
  }
  ExpectCheck([&] { LogN(context_, Put(positions), 1, Floats(x, 3, kCols)); },
              "logn: trained_length is 1");
}

TEST_P(RowOpsTest, Convert) {
  std::vector<float> x = Numbered(kRows, kCols);
  std::vector<BFloat16> y(static_cast<size_t>(kRows * kCols));
  const Matrix to{Put(y), DType::kBFloat16, kRows, kCols, kCols};
  Convert(context_, Floats(x, kRows, kCols), to);
  Fetch(y);
  for (int64_t r = 0; r < kRows; ++r) {
    ASSERT_EQ(y[static_cast<size_t>(r * kCols + 5)].bits, static_cast<uint16_t>(r));
  }
  ExpectCheck([&] { Convert(context_, Floats(x, 3, kCols), to); },
              "convert: x is [3, 1024], y is [37, 1024]");
}

TEST_P(RowOpsTest, NormGather) {
  std::vector<float> x = Numbered(kRows, kCols);
  std::vector<float> y(static_cast<size_t>(kRows * kCols));
  std::vector<float> weight(kCols, 0.0f);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 20; ++i) ids.push_back(i * 7 % kRows);
  NormGather(context_, Floats(x, kRows, kCols), Put(ids), {Put(weight), 0.0f},
             Floats(y, 20, kCols));
  Fetch(y);
  for (int64_t r = 0; r < 20; ++r) {
    ASSERT_EQ(y[static_cast<size_t>(r * kCols + 3)],
              static_cast<float>(ids[static_cast<size_t>(r)] * 10000 + 3));
  }
  ExpectCheck(
      [&] {
        NormGather(context_, Floats(x, kRows, kCols), nullptr, {Put(weight), 0.0f},
                   Floats(y, 20, kCols));
      },
      "no rows are named");
}

TEST_P(RowOpsTest, NormHeadsLeavesTheOthers) {
  const int64_t head_dim = 128;
  std::vector<float> x = Numbered(kRows, kCols);
  const std::vector<float> before = x;
  std::vector<float> weight(head_dim, 1.0f);
  NormHeads(context_, Floats(x, kRows, kCols), 2, 3, head_dim, {Put(weight), 0.0f});
  Fetch(x);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < kCols; ++i) {
      const size_t at = static_cast<size_t>(r * kCols + i);
      const bool inside = i >= 2 * head_dim && i < 5 * head_dim;
      ASSERT_EQ(x[at], before[at] + (inside ? 1.0f : 0.0f)) << r << ", " << i;
    }
  }
  ExpectCheck(
      [&] { NormHeads(context_, Floats(x, kRows, kCols), 6, 3, head_dim, {Put(weight), 0.0f}); },
      "do not lie in 1024 columns");
}

TEST_P(RowOpsTest, Embedding) {
  std::vector<float> table(1), out(static_cast<size_t>(kRows * kCols));
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < kRows; ++i) ids.push_back(i * 5 % 50);
  const EmbeddingWeight weight{Put(table), DType::kFloat32, kCols, /*packed=*/true};
  EmbeddingLookup(context_, weight, Put(ids), Floats(out, kRows, kCols));
  Fetch(out);
  for (int64_t r = 0; r < kRows; ++r) {
    ASSERT_EQ(out[static_cast<size_t>(r * kCols + kCols - 1)],
              static_cast<float>(1000 + r * 5 % 50));
  }
  const EmbeddingWeight rows{Put(table), DType::kFloat32, kCols, /*packed=*/false};
  EmbeddingLookup(context_, rows, Put(ids), Floats(out, kRows, kCols), /*accumulate=*/true);
  ASSERT_EQ(Fetch(out)[kCols], static_cast<float>(1000 + 5 + 500 + 5));
  ExpectCheck([&] { EmbeddingLookup(context_, weight, Put(ids), Floats(out, kRows, kCols), true); },
              "rows of a packed table are not added");
  ExpectCheck([&] { EmbeddingLookup(context_, weight, nullptr, Floats(out, kRows, kCols)); },
              "embedding: no ids");
}

TEST_P(RowOpsTest, Rope) {
  std::vector<float> x = Numbered(kRows, kCols);
  const std::vector<float> before = x;
  std::vector<float> cos_sin(1);
  std::vector<int32_t> positions;
  for (int32_t i = 0; i < kRows; ++i) positions.push_back(i * 3);
  const RopeView rope{Put(cos_sin), 32, /*interleaved=*/false};
  Rope(context_, Floats(x, kRows, kCols), 7, 128, Put(positions), rope);
  Fetch(x);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < kCols; ++i) {
      const size_t at = static_cast<size_t>(r * kCols + i);
      ASSERT_EQ(x[at], before[at] + (i < 7 * 128 ? static_cast<float>(3 * r + 1) : 0.0f));
    }
  }
  ExpectCheck([&] { Rope(context_, Floats(x, kRows, kCols), 7, 128, nullptr, rope); },
              "rope: no positions");
  ExpectCheck([&] { Rope(context_, Floats(x, kRows, kCols), 9, 128, Put(positions), rope); },
              "9 heads of 128 elements");
}

TEST_P(RowOpsTest, GatedAct) {
  std::vector<float> x = Numbered(kRows, 2 * kCols);
  std::vector<float> out(static_cast<size_t>(kRows * kCols));
  GatedAct(context_, kernels::Activation::kSilu, Floats(x, kRows, 2 * kCols),
           Floats(out, kRows, kCols));
  for (const float value : Fetch(out)) ASSERT_EQ(value, -static_cast<float>(kCols));
  ExpectCheck(
      [&] {
        GatedAct(context_, kernels::Activation::kSilu, Floats(x, kRows, kCols),
                 Floats(out, kRows, kCols));
      },
      "x holds gate and up");
  std::fill(out.begin(), out.end(), 0.0f);
  std::vector<float> up = Numbered(kRows, kCols);
  Activate(context_, kernels::Activation::kSilu, Floats(up, kRows, kCols),
           Floats(out, kRows, kCols));
  Fetch(out);
  for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], up[i] - 1);
  ExpectCheck(
      [&] {
        Activate(context_, kernels::Activation::kSilu, Floats(x, kRows, 2 * kCols),
                 Floats(out, kRows, kCols));
      },
      "x holds up alone");
}

TEST_P(RowOpsTest, ArgMax) {
  std::vector<float> x = Numbered(kRows, kCols);
  std::vector<int32_t> index(kRows);
  ArgMax(context_, Floats(x, kRows, kCols), Put(index));
  Fetch(index);
  for (int32_t r = 0; r < kRows; ++r) ASSERT_EQ(index[static_cast<size_t>(r)], r * 10000);
}

TEST_P(RowOpsTest, Hadamard) {
  std::vector<float> x = Numbered(kRows, kCols);
  std::vector<float> y(static_cast<size_t>(kRows * (kCols + 2)), -1.0f);
  const Matrix from = Floats(x, kRows, kCols), to = Floats(y, kRows, kCols, kCols + 2);
  Hadamard(context_, from, /*head_dim=*/kCols / 4, to);
  Fetch(y);
  // The tracing kernel adds what it is to write, and the size of the matrix.
  const auto size = static_cast<float>(HadamardSize(kCols / 4));
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < kCols + 2; ++i) {
      const float expected = i < kCols ? static_cast<float>(r * 10000 + i) + size - 1.0f : -1.0f;
      ASSERT_EQ(y[static_cast<size_t>(r * (kCols + 2) + i)], expected) << r << ", " << i;
    }
  }
  ExpectCheck([&] { Hadamard(context_, from, 100, to); }, "hadamard: heads of 100 elements");
}

TEST_P(RowOpsTest, MissingKernelsAreNamed) {
  const kernels::KernelTable empty{.name = "empty"};
  OpDevice device(empty, GetParam());
  const OpContext& context = device.context();
  std::vector<float> x(8), y(8), weight(4);
  std::vector<int32_t> ids(2);
  const Matrix mx = Floats(x, 2, 4);
  const Matrix my = Floats(y, 2, 4);
  const Matrix half = Floats(y, 2, 2);
  const std::string message = "kernel table 'empty' has no entry for float32";
  ExpectCheck([&] { Norm(context, mx, {Put(weight)}, my); }, message);
  ExpectCheck([&] { GatedAct(context, kernels::Activation::kRelu, mx, half); }, message);
  ExpectCheck([&] { ArgMax(context, mx, Put(ids)); }, message);
  ExpectCheck([&] { Rope(context, mx, 1, 4, Put(ids), {Put(x), 4}); }, message);
  ExpectCheck([&] { EmbeddingLookup(context, {Put(x), DType::kFloat32, 4}, Put(ids), my); },
              message);
}

TEST_P(RowOpsTest, NormRefusesWhatDoesNotFit) {
  std::vector<float> x(8), y(8), weight(4);
  ExpectCheck([&] { Norm(context_, Floats(x, 2, 4), {Put(weight)}, Floats(y, 2, 3)); },
              "x has 4 columns, y has 3");
  ExpectCheck([&] { Norm(context_, Floats(x, 2, 4), {Put(weight)}, Floats(y, 1, 4)); },
              "x has 2 rows, y has 1");
  ExpectCheck([&] { Norm(context_, Floats(x, 2, 4), {}, Floats(y, 2, 4)); }, "no weight");
}

INSTANTIATE_TEST_SUITE_P(Threads, RowOpsTest, ::testing::Values(1, 2, 3, 8));

}  // namespace
}  // namespace allspark
