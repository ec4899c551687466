// Ops that write or read int8 rows: on the real kernels, against the float op followed by the
// quantiser, for any number of threads.
#include "ops/quantize.h"

#include <random>

#include "cpp/ops/op_test_util.h"
#include "kernels/kernel_table.h"
#include "ops/convert.h"
#include "ops/embedding.h"
#include "ops/gated_act.h"
#include "ops/gather_columns.h"
#include "ops/linear.h"
#include "ops/norm.h"

namespace allspark {
namespace {

using testing::ExpectCheck;
using testing::OpDevice;
using testing::OpTest;

std::vector<float> Random(int64_t n, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& e : x) e = normal(engine);
  return x;
}

// An int8 matrix on a device, and the vectors of its rows, scales and sums.
struct Int8Rows {
  OpDevice& device;
  std::vector<int8_t> q;
  std::vector<float> scale;
  std::vector<int32_t> sums;
  Matrix matrix;

  Int8Rows(OpDevice& on, int64_t rows, int64_t cols, int64_t scale_group = 0)
      : device(on),
        q(static_cast<size_t>(rows * cols), 99),
        scale(static_cast<size_t>(rows * kernels::RowScales(cols, scale_group)), -1.0f),
        sums(static_cast<size_t>(rows * kernels::RowSums(cols)), -1),
        matrix{device.Put(q),     DType::kInt8,     rows,       cols, cols,
               device.Put(scale), device.Put(sums), scale_group} {}
  Int8Rows(const Int8Rows&) = delete;

  const Int8Rows& Fetch() {
    device.Fetch(q);
    device.Fetch(scale);
    device.Fetch(sums);
    return *this;
  }

  bool operator==(const Int8Rows& other) const {
    return q == other.q && scale == other.scale && sums == other.sums;
  }
};

class QuantizeOpTest : public OpTest {
 protected:
  static constexpr int64_t kCols = 200;
  QuantizeOpTest() : OpTest(*kernels::AvailableTables().back(), /*scratch_floats=*/kCols) {}
};

TEST_P(QuantizeOpTest, NormsAndActivationsAreThoseOfFloat32Quantised) {
  for (const int64_t rows : {1, 3, 150}) {
    std::vector<float> x = Random(rows * 2 * kCols, 1), weight = Random(kCols, 2);
    std::vector<float> y(static_cast<size_t>(rows * kCols));
    const Matrix to_float = Floats(y, rows, kCols);
    Int8Rows expected(device_, rows, kCols), actual(device_, rows, kCols);

    const Matrix half = Floats(x, rows, kCols, 2 * kCols);
    for (const bool centered : {false, true}) {
      const NormWeight norm{Put(weight), 1e-5f, centered, centered ? Put(weight) : nullptr};
      Norm(context_, half, norm, to_float);
      Quantize(context_, to_float, expected.matrix);
      Norm(context_, half, norm, actual.matrix);
      EXPECT_TRUE(expected.Fetch() == actual.Fetch()) << rows << " rows of norms";

      const std::vector<int64_t> ids = {rows - 1, 0};
      Int8Rows gathered(device_, 2, kCols);
      NormGather(context_, half, Put(ids), norm, gathered.matrix);
      gathered.Fetch();
      EXPECT_EQ(gathered.scale[0], expected.scale[static_cast<size_t>(rows - 1)]);
      EXPECT_EQ(gathered.scale[1], expected.scale[0]);
    }

    Activate(context_, kernels::Activation::kGeluErf, half, to_float);
    Quantize(context_, to_float, expected.matrix);
    Activate(context_, kernels::Activation::kGeluErf, half, actual.matrix);
    EXPECT_TRUE(expected.Fetch() == actual.Fetch()) << rows << " rows without gates";
    GatedAct(context_, kernels::Activation::kSilu, Floats(x, rows, 2 * kCols), to_float);
    Quantize(context_, to_float, expected.matrix);
    GatedAct(context_, kernels::Activation::kSilu, Floats(x, rows, 2 * kCols), actual.matrix);
    EXPECT_TRUE(expected.Fetch() == actual.Fetch()) << rows << " rows of activations";
  }
}

// The widened rows of adapters, too.
TEST_P(QuantizeOpTest, GroupsOfColumnsHaveScalesOfTheirOwn) {
  const int64_t cols = 192, group = 64;
  for (const int64_t rows : {1, 3, 150}) {
    std::vector<float> x = Random(rows * cols, 1), weight = Random(cols, 2);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= i % 192 < 64 ? 100.0f : 1.0f;
    Int8Rows whole(device_, rows, cols, group);
    Quantize(context_, Floats(x, rows, cols), whole.matrix);
    whole.Fetch();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t begin = 0; begin < cols; begin += group) {
        const auto at = static_cast<size_t>(row * cols + begin);
        std::vector<float> part(x.begin() + static_cast<int64_t>(at),
                                x.begin() + static_cast<int64_t>(at) + group);
        Int8Rows alone(device_, 1, group);
        Quantize(context_, Floats(part, 1, group), alone.matrix);
        alone.Fetch();
        EXPECT_EQ(whole.scale[static_cast<size_t>(row * 3 + begin / group)], alone.scale[0]);
        for (size_t i = 0; i < static_cast<size_t>(group); ++i) {
          ASSERT_EQ(whole.q[at + i], alone.q[i]) << "row " << row << " column " << begin;
        }
      }
    }
    Int8Rows normed(device_, rows, cols, group), expected(device_, rows, cols, group);
    const NormWeight norm{Put(weight), 1e-5f};
    std::vector<float> y(x.size());
    const Matrix from = Floats(x, rows, cols), to = Floats(y, rows, cols);
    Norm(context_, from, norm, to);
    Quantize(context_, to, expected.matrix);
    Norm(context_, from, norm, normed.matrix);
    EXPECT_TRUE(normed.Fetch() == expected.Fetch()) << rows << " rows";
  }
}

TEST_P(QuantizeOpTest, ColumnsInAnotherOrderAreThoseOfFloat32Quantised) {
  std::vector<int32_t> order;  // 67 and 200 have no common divisor.
  for (int32_t i = 0; i < kCols; ++i) order.push_back(static_cast<int32_t>(i * 67 % kCols));
  for (const int64_t rows : {1, 3, 150}) {
    std::vector<float> x = Random(rows * kCols, 1);
    std::vector<float> moved(x.size(), -1.0f);
    const Matrix from = Floats(x, rows, kCols), to = Floats(moved, rows, kCols);
    GatherColumns(context_, from, Put(order), to);
    Fetch(moved);
    for (size_t i = 0; i < moved.size(); ++i) {
      const size_t row = i / kCols * kCols;
      ASSERT_EQ(moved[i], x[row + static_cast<size_t>(order[i % kCols])]) << rows << " rows, " << i;
    }
    Int8Rows quantised(device_, rows, kCols), expected(device_, rows, kCols),
        actual(device_, rows, kCols);
    Quantize(context_, to, expected.matrix);
    Quantize(context_, from, quantised.matrix);
    GatherColumns(context_, quantised.matrix, Put(order), actual.matrix);
    EXPECT_TRUE(expected.Fetch() == actual.Fetch()) << rows << " rows";
  }
  std::vector<float> x(kCols), y(kCols);
  const Matrix from = Floats(x, 1, kCols);
  ExpectCheck([&] { GatherColumns(context_, from, nullptr, Floats(y, 1, kCols)); },
              "gather_columns: there is no order");
  ExpectCheck([&] { GatherColumns(context_, from, Put(order), Floats(y, 1, kCols - 1)); },
              "gather_columns: x is [1, 200], y is [1, 199]");
  Int8Rows quantised(device_, 1, kCols), bare(device_, 1, kCols);
  bare.matrix.row_sums = nullptr;
  ExpectCheck([&] { GatherColumns(context_, quantised.matrix, Put(order), bare.matrix); },
              "gather_columns: y is int8 without scales");
  ExpectCheck([&] { GatherColumns(context_, from, Put(order), bare.matrix); },
              "gather_columns: y is int8");
}

// An 8-bit weight in `groups` groups; all columns, rows and groups differ.
struct Weight {
  std::vector<uint8_t> w, zero;
  std::vector<BFloat16> scale;
  LinearWeight linear;

  Weight(int64_t n, int64_t k, int64_t groups, InputFormat activation) {
    std::mt19937 engine(5);
    const int64_t padded = (n + 63) / 64 * 64;
    w.resize(static_cast<size_t>(padded * k));
    for (uint8_t& e : w) e = static_cast<uint8_t>(engine());
    zero.resize(static_cast<size_t>(padded * groups));
    for (uint8_t& e : zero) e = static_cast<uint8_t>(engine());
    for (const float e : Random(padded * groups, 6)) scale.push_back(ToBFloat16(0.01f * e));
    linear = {w.data(), DType::kUInt8, n, k, nullptr, {}, activation};
    linear.scales.scale = scale.data();
    linear.scales.zero = zero.data();
    linear.scales.group_size = k / groups;
  }
  // The same on a device.
  LinearWeight Put(OpDevice& device) const {
    LinearWeight there = linear;
    there.data = device.Put(w);
    there.scales.scale = device.Put(scale);
    there.scales.zero = device.Put(zero);
    return there;
  }
};

TEST_P(QuantizeOpTest, LinearHandsEveryRowItsScales) {
  const int64_t n = 300, k = 192;
  for (const int64_t rows : {1, 40, 130}) {
    for (const auto& [groups, scale_group] :
         {std::pair<int64_t, int64_t>{1, 0}, {3, 0}, {1, 64}, {3, 32}}) {
      std::vector<float> x = Random(rows * k, 7);
      const Weight weight(n, k, groups, {DType::kInt8, scale_group});
      Int8Rows q(device_, rows, k, scale_group);
      Quantize(context_, Floats(x, rows, k), q.matrix);
      std::vector<float> y(static_cast<size_t>(rows * n)), whole(y.size());
      Linear(context_, q.matrix, weight.Put(device_), false, Floats(y, rows, n));
      Fetch(y);
      q.Fetch();
      kernels::GemmArgs args{};
      args.a = q.q.data();
      args.lda = args.k = k;
      args.w = weight.w.data();
      args.c = whole.data();
      args.ldc = args.n = n;
      args.m = rows;
      args.panel_end = (n + 63) / 64;
      args.scales = weight.linear.scales;
      args.a_scale = q.scale.data();
      args.a_scale_group = scale_group;
      args.a_sums = q.sums.data();
      kernels::AvailableTables().back()->gemm[static_cast<int>(DType::kUInt8)]
                                             [static_cast<int>(DType::kInt8)](args);
      EXPECT_EQ(y, whole) << rows << " rows, " << groups << " groups, scales for " << scale_group;
    }
  }
}

TEST_P(QuantizeOpTest, RefusesWhatDoesNotFit) {
  std::vector<float> x(2 * kCols), weight(kCols);
  Int8Rows q(device_, 2, kCols);
  Matrix bare = q.matrix;
  bare.row_sums = nullptr;
  ExpectCheck([&] { Quantize(context_, Floats(x, 2, kCols), bare); }, "room for its scales");
  ExpectCheck([&] { Quantize(context_, Floats(x, 1, kCols), q.matrix); }, "x is [1, 200]");
  OpContext context = context_;
  context.row_scratch.floats = kCols - 1;
  const auto norm = [&] { Norm(context, Floats(x, 2, kCols), {Put(weight)}, q.matrix); };
  ExpectCheck(norm, "scratch row of 199 elements for 200");

  std::vector<float> y(2 * 64);
  const Weight weights(64, kCols, 1, DType::kInt8);
  LinearWeight quantized = weights.Put(device_);
  const auto linear = [&](const ConstMatrix& from) {
    Linear(context_, from, quantized, false, Floats(y, 2, 64));
  };
  ExpectCheck([&] { linear(Floats(x, 2, kCols)); }, "x is float32; expected int8");
  ExpectCheck([&] { linear(bare); }, "int8 without scales");
  Int8Rows scaled(device_, 2, kCols, 40);
  ExpectCheck([&] { linear(scaled.matrix); },
              "x has a scale for every 40 columns; the weight reads one for 0");
  ExpectCheck([&] { Quantize(context_, Floats(x, 2, kCols), scaled.matrix); },
              "a scale for every 40 of 200 columns");
  quantized.scales.group_size = 8;
  ExpectCheck([&] { linear(q.matrix); }, "a scale for every 8 of 200");
  quantized.scales = {};
  ExpectCheck([&] { linear(q.matrix); }, "a scale for every 0 of 200");
  EmbeddingWeight table{Put(weights.w), DType::kUInt8, kCols, /*packed=*/true};
  const std::vector<int32_t> ids = {0};
  std::vector<float> row(kCols);
  ExpectCheck([&] { EmbeddingLookup(context_, table, Put(ids), Floats(row, 1, kCols)); },
              "embedding: a scale for every 0");
}

INSTANTIATE_TEST_SUITE_P(Threads, QuantizeOpTest, ::testing::Values(1, 2, 5));

}  // namespace
}  // namespace allspark
