// Kernels over quantised weights and activations: every table against sums in double over the
// unpacked integers, and the independence of a row's bits from other rows and from the split.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpp/kernels/kernel_test_util.h"

namespace allspark::kernels {
namespace {

enum class Act { kInt8, kFloat32, kBFloat16 };
DType DTypeOf(Act act) {
  return act == Act::kInt8      ? DType::kInt8
         : act == Act::kFloat32 ? DType::kFloat32
                                : DType::kBFloat16;
}

struct Shape {
  int bits;
  Act act;
  int64_t m, n, k, group_size;
  bool asymmetric = false, bias = false, accumulate = false;
  int64_t scale_group = 0;  // of int8 activations
};

std::string Text(const Shape& s) {
  return std::to_string(s.bits) + " bits, activations " + std::to_string(static_cast<int>(s.act)) +
         ", m=" + std::to_string(s.m) + " n=" + std::to_string(s.n) + " k=" + std::to_string(s.k) +
         " group=" + std::to_string(s.group_size) + (s.asymmetric ? " asymmetric" : "") +
         " scale_group=" + std::to_string(s.scale_group);
}

// Packs stored integers u[k][n] into lanes, following the layout's description.
std::vector<uint8_t> PackIntegers(const std::vector<uint8_t>& u, int bits, int64_t k, int64_t n) {
  const int64_t panels = (n + kPanelColumns - 1) / kPanelColumns, per_lane = 32 / bits;
  std::vector<uint8_t> packed(static_cast<size_t>(panels * kPanelColumns * k * bits / 8), 0);
  for (int64_t row = 0; row < k; ++row) {
    for (int64_t col = 0; col < n; ++col) {
      const int64_t lane = col / kPanelColumns * (k / per_lane) * kPanelColumns +
                           row / per_lane * kPanelColumns + col % kPanelColumns;
      const int64_t at = row % per_lane;
      const uint8_t value = u[static_cast<size_t>(row * n + col)];
      uint8_t& byte = packed[static_cast<size_t>(lane * 4 + at % 4)];
      byte = static_cast<uint8_t>(byte | (at >= 4 ? value << 4 : value));
    }
  }
  return packed;
}

// [groups][n] to [ceil(n/64)][groups][64].
template <class T>
std::vector<T> PackGroups(const std::vector<T>& x, int64_t groups, int64_t n) {
  const int64_t panels = (n + kPanelColumns - 1) / kPanelColumns;
  std::vector<T> packed(static_cast<size_t>(panels * groups * kPanelColumns), T{});
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t col = 0; col < n; ++col) {
      packed[static_cast<size_t>((col / kPanelColumns * groups + g) * kPanelColumns +
                                 col % kPanelColumns)] = x[static_cast<size_t>(g * n + col)];
    }
  }
  return packed;
}

struct Problem {
  Shape shape;
  std::vector<float> x;       // [m][k]: activations before quantisation, or as they are
  std::vector<uint8_t> u, w;  // [k][n], and packed
  std::vector<BFloat16> scale, packed_scale;
  std::vector<uint8_t> zero, packed_zero;
  std::vector<int8_t> q;
  std::vector<float> a_scale;
  std::vector<int32_t> a_sums;
  std::vector<BFloat16> narrow;
  std::vector<float> bias, c;

  Problem(const Shape& s, uint32_t seed) : shape(s) {
    Data data(seed);
    x = data.Vector<float>(s.m * s.k);
    u.resize(static_cast<size_t>(s.k * s.n));
    for (uint8_t& e : u) e = static_cast<uint8_t>(data.Below(int64_t{1} << s.bits));
    const int64_t groups = s.k / s.group_size;
    scale = data.Vector<BFloat16>(groups * s.n, 0.01f);
    zero.resize(static_cast<size_t>(groups * s.n));
    for (uint8_t& e : zero) e = static_cast<uint8_t>(data.Below(int64_t{1} << s.bits));
    w = PackIntegers(u, s.bits, s.k, s.n);
    packed_scale = PackGroups(scale, groups, s.n);
    packed_zero = PackGroups(zero, groups, s.n);
    bias = data.Vector<float>(s.n);
    c = data.Vector<float>(s.m * s.n);
    for (const float e : x) narrow.push_back(ToBFloat16(e));
    QuantizeRows();
  }

  int64_t NumScales() const { return RowScales(shape.k, shape.scale_group); }

  void QuantizeRows() {
    q.resize(x.size());
    a_scale.resize(static_cast<size_t>(shape.m * NumScales()));
    a_sums.resize(static_cast<size_t>(shape.m * RowSums(shape.k)));
    QuantizeArgs args = {x.data(),      shape.k, q.data(), shape.k,          a_scale.data(),
                         a_sums.data(), shape.m, shape.k,  shape.scale_group};
    FindTable("reference")->quantize(args, nullptr);
  }

  GemmArgs Args(std::vector<float>& out, int64_t row_begin, int64_t rows) const {
    GemmArgs args = {};
    args.a = shape.act == Act::kInt8      ? static_cast<const void*>(q.data() + row_begin * shape.k)
             : shape.act == Act::kFloat32 ? static_cast<const void*>(x.data() + row_begin * shape.k)
                                          : narrow.data() + row_begin * shape.k;
    args.lda = shape.k;
    args.w = w.data();
    args.bias = shape.bias ? bias.data() : nullptr;
    args.c = out.data() + row_begin * shape.n;
    args.ldc = shape.n;
    args.m = rows;
    args.n = shape.n;
    args.k = shape.k;
    args.panel_end = (shape.n + kPanelColumns - 1) / kPanelColumns;
    args.accumulate = shape.accumulate;
    args.scale = packed_scale.data();
    args.zero = shape.asymmetric ? packed_zero.data() : nullptr;
    args.group_size = shape.group_size;
    if (shape.act == Act::kInt8) {
      args.a_scale = a_scale.data() + row_begin * NumScales();
      args.a_scale_group = shape.scale_group;
      args.a_sums = a_sums.data() + row_begin * RowSums(shape.k);
    }
    return args;
  }

  void Run(const KernelTable& table, std::vector<float>& out, int64_t begin, int64_t rows) const {
    const DType dtype = shape.bits == 8 ? DType::kUInt8 : DType::kUInt4;
    const auto gemm = table.gemm[static_cast<int>(dtype)][static_cast<int>(DTypeOf(shape.act))];
    gemm(Args(out, begin, rows), nullptr);
  }
  std::vector<float> Run(const KernelTable& table) const {
    std::vector<float> out = c;
    Run(table, out, 0, shape.m);
    return out;
  }

  double Activation(int64_t m, int64_t k) const {
    const auto at = static_cast<size_t>(m * shape.k + k);
    const int64_t group = shape.scale_group == 0 ? shape.k : shape.scale_group;
    const auto scale_at = static_cast<size_t>(m * NumScales() + k / group);
    return shape.act == Act::kInt8
               ? static_cast<double>(q[at]) * static_cast<double>(a_scale[scale_at])
           : shape.act == Act::kFloat32 ? static_cast<double>(x[at])
                                        : static_cast<double>(ToFloat(narrow[at]));
  }
  double Weight(int64_t k, int64_t n) const {
    const auto group = static_cast<size_t>(k / shape.group_size * shape.n + n);
    const int z = shape.asymmetric ? zero[group] : shape.bits == 8 ? 128 : 8;
    return (u[static_cast<size_t>(k * shape.n + n)] - z) *
           static_cast<double>(ToFloat(scale[group]));
  }
};

void ExpectCorrect(const KernelTable& table, const Problem& p) {
  SCOPED_TRACE(Text(p.shape));
  const Shape& s = p.shape;
  const std::vector<float> out = p.Run(table);
  for (int64_t m = 0; m < s.m; ++m) {
    for (int64_t n = 0; n < s.n; ++n) {
      const auto at = static_cast<size_t>(m * s.n + n);
      double sum = 0, sum_abs = 0;
      const auto add = [&](double term) { sum += term, sum_abs += std::fabs(term); };
      for (int64_t k = 0; k < s.k; ++k) add(p.Activation(m, k) * p.Weight(k, n));
      if (s.bias) add(static_cast<double>(p.bias[static_cast<size_t>(n)]));
      if (s.accumulate) add(static_cast<double>(p.c[at]));
      // Beside the k products and sums: a conversion, the scales of each group (a product, and a
      // product and a sum in one), the row's or the column's scale.
      const int64_t group =
          s.scale_group == 0 ? s.group_size : std::min(s.group_size, s.scale_group);
      ASSERT_NEAR(static_cast<double>(out[at]), sum, DotBound(s.k + 2 * (s.k / group) + 3, sum_abs))
          << "row " << m << " column " << n;
    }
  }
}

// Depths and group sizes of every kind: one group, a group within a block, a group over several
// blocks.
struct Depth {
  int64_t k, group_size;
};
const std::vector<Depth>& Depths() {
  static const std::vector<Depth> depths = {{8, 8},     {40, 40},    {512, 512},  {1336, 1336},
                                            {96, 32},   {64, 64},    {1152, 128}, {640, 64},
                                            {1088, 32}, {2048, 1024}};
  return depths;
}

std::vector<Shape> Shapes() {
  std::vector<Shape> shapes;
  int index = 0;
  for (const int bits : {8, 4}) {
    for (const Act act : {Act::kInt8, Act::kFloat32, Act::kBFloat16}) {
      for (const Depth depth : Depths()) {
        const int64_t rows[] = {1, 2, 3, 6, 7, 13, 100};
        const int64_t columns[] = {1, 16, 17, 64, 65, 130};
        shapes.push_back({bits, act, rows[index % 7], columns[index % 6], depth.k, depth.group_size,
                          index % 2 == 0, index % 3 == 0, index % 5 == 0});
        ++index;
      }
      shapes.push_back({bits, act, 9, 64, 256, 64, true, true, true});
      shapes.push_back({bits, act, 4, 70, 256, 64, false, true, true});
      shapes.push_back({bits, act, 97, 66, 128, 32, false, false, false});
    }
    // Scales of activations beside one scale for each column, and beside smaller, equal and larger
    // groups of weights.
    const std::pair<Depth, int64_t> scaled[] = {
        {{64, 64}, 64},     {{96, 96}, 32},    {{640, 640}, 64},  {{1280, 1280}, 128},
        {{4224, 4224}, 32}, {{1088, 32}, 64},  {{512, 32}, 128},  {{256, 64}, 128},
        {{1024, 64}, 64},   {{1152, 128}, 32}, {{1152, 128}, 64}, {{2048, 1024}, 64}};
    for (const auto& [depth, scale_group] : scaled) {
      const int64_t rows[] = {1, 2, 3, 4, 5, 6, 7, 13, 100};
      const int64_t columns[] = {1, 16, 17, 64, 65, 130};
      shapes.push_back({bits, Act::kInt8, rows[index % 9], columns[index % 6], depth.k,
                        depth.group_size, index % 2 == 0, index % 3 == 0, index % 5 == 0,
                        scale_group});
      ++index;
    }
    shapes.push_back({bits, Act::kInt8, 40, 64, 192, 192, true, true, true, 64});
    shapes.push_back({bits, Act::kInt8, 40, 70, 192, 32, true, true, true, 64});
    shapes.push_back({bits, Act::kInt8, 97, 66, 256, 128, false, false, false, 64});
  }
  return shapes;
}

using QuantizedTest = KernelTest;

TEST_P(QuantizedTest, MatchesTheSums) {
  uint32_t seed = 1;
  for (const Shape& shape : Shapes()) ExpectCorrect(table(), Problem(shape, seed++));
}

TEST_P(QuantizedTest, ARowDependsOnNoOther) {
  for (Shape shape : Shapes()) {
    if (shape.n > 70) continue;
    shape.m = 20;
    SCOPED_TRACE(Text(shape));
    const Problem p(shape, 7);
    const std::vector<float> whole = p.Run(table());
    for (const auto& [begin, rows] :
         {std::pair<int64_t, int64_t>{0, 1}, {19, 1}, {3, 2}, {5, 13}}) {
      std::vector<float> out = p.c;
      p.Run(table(), out, begin, rows);
      ASSERT_TRUE(
          SameBits(out.data() + begin * shape.n, whole.data() + begin * shape.n, rows * shape.n))
          << "rows " << begin << " to " << begin + rows;
    }
  }
}

TEST_P(QuantizedTest, PanelsMayBeSplit) {
  for (const int bits : {8, 4}) {
    for (const Act act : {Act::kInt8, Act::kFloat32, Act::kBFloat16}) {
      const Problem p({bits, act, 8, 300, 192, 64, true, true, true}, 12);
      const std::vector<float> whole = p.Run(table());
      std::vector<float> split = p.c;
      const DType dtype = bits == 8 ? DType::kUInt8 : DType::kUInt4;
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{3, 5}, {0, 1}, {1, 1}, {1, 3}}) {
        GemmArgs args = p.Args(split, 0, 8);
        args.panel_begin = begin;
        args.panel_end = end;
        table().gemm[static_cast<int>(dtype)][static_cast<int>(DTypeOf(act))](args, nullptr);
      }
      EXPECT_TRUE(SameBits(whole.data(), split.data(), static_cast<int64_t>(whole.size())));
    }
  }
}

TEST_P(QuantizedTest, GatedGivesTheBitsOfBothSteps) {
  const int64_t cols = 2 * kPanelColumns;
  for (const int bits : {8, 4}) {
    const int weight = static_cast<int>(bits == 8 ? DType::kUInt8 : DType::kUInt4);
    for (const Act act : {Act::kInt8, Act::kFloat32, Act::kBFloat16}) {
      const auto gated = table().gemm_gated[weight][static_cast<int>(DTypeOf(act))];
      if (gated == nullptr) GTEST_SKIP() << table().name << " has no gated GEMM";
      for (const int64_t m : {1, 9, 100}) {
        const Problem p({bits, act, m, 2 * cols, 192, 64, true, true}, 21);
        std::vector<float> both = p.Run(table());
        std::vector<float> expected(static_cast<size_t>(m * cols)), out(expected.size());
        table().gated_act[kSlotOf<float>](
            {both.data(), 2 * cols, expected.data(), cols, m, cols, Activation::kSilu}, nullptr);
        GemmGatedArgs args = {p.Args(both, 0, m), out.data(), cols, DType::kFloat32,
                              Activation::kSilu};
        args.gemm.panel_end = 2;
        gated(args, nullptr);
        EXPECT_TRUE(SameBits(expected.data(), out.data(), m * cols)) << Text(p.shape);
      }
    }
  }
}

// Integer sums are exact, and all tables have the same later operations, so the bits are equal. The
// reference differs, since it computes in double.
TEST_P(QuantizedTest, EveryInstructionSetGivesTheSameBitsForInt8Activations) {
  if (AvailableTables().size() < 2 || &table() == AvailableTables().front()) {
    GTEST_SKIP() << "nothing to compare";
  }
  const KernelTable* first = AvailableTables()[1];
  uint32_t seed = 50;
  for (const Shape& shape : Shapes()) {
    if (shape.act != Act::kInt8) continue;
    const Problem p(shape, seed++);
    const std::vector<float> expected = p.Run(*first), out = p.Run(table());
    ASSERT_TRUE(SameBits(expected.data(), out.data(), static_cast<int64_t>(out.size())))
        << Text(shape);
  }
}

// Extreme values: products that overflow 16 bits, and sums that overflow 32 bits before the zero
// point is subtracted.
TEST_P(QuantizedTest, TheLargestIntegersAreExact) {
  for (const int bits : {8, 4}) {
    Problem p({bits, Act::kInt8, 7, 64, 4096, 4096, true}, 3);
    std::fill(p.u.begin(), p.u.end(), bits == 8 ? 255 : 15);
    std::fill(p.packed_zero.begin(), p.packed_zero.end(), 0);
    std::fill(p.zero.begin(), p.zero.end(), 0);
    std::fill(p.x.begin(), p.x.end(), -1.0f);
    p.w = PackIntegers(p.u, bits, 4096, 64);
    p.QuantizeRows();
    ExpectCorrect(table(), p);
  }
}

TEST_P(QuantizedTest, QuantizesRowsToTheSameIntegersAsTheReference) {
  const std::pair<int64_t, int64_t> sizes[] = {{1, 0},   {7, 0},    {16, 0},   {31, 0},   {32, 0},
                                               {33, 0},  {64, 0},   {100, 0},  {897, 0},  {32, 32},
                                               {64, 64}, {192, 32}, {896, 64}, {384, 128}};
  for (const auto& [cols, scale_group] : sizes) {
    SCOPED_TRACE("scales for " + std::to_string(scale_group) + " of " + std::to_string(cols));
    const int64_t rows = 6, num_scales = RowScales(cols, scale_group);
    Data data(static_cast<uint32_t>(cols));
    std::vector<float> x = data.Vector<float>(rows * cols);
    std::fill_n(x.begin() + cols, cols, 0.0f);  // a row of zeros
    for (int64_t i = 0; i < cols; ++i) x[static_cast<size_t>(2 * cols + i)] *= 0x1p-120f;  // tiny
    for (int64_t i = 0; i < cols; ++i) {                                                   // ties
      x[static_cast<size_t>(3 * cols + i)] = static_cast<float>(i % 254 - 127) + 0.5f;
    }
    x[static_cast<size_t>(3 * cols)] = 127.0f;
    x[static_cast<size_t>(4 * cols + cols / 2)] = 1e30f;  // one outlier
    std::vector<int8_t> q(x.size()), expected_q(x.size());
    std::vector<float> scale(static_cast<size_t>(rows * num_scales)), expected_scale(scale.size());
    std::vector<int32_t> sums(static_cast<size_t>(rows * RowSums(cols))),
        expected_sums(sums.size());
    const auto run = [&, cols = cols, group = scale_group](const KernelTable& t, auto& to_q,
                                                           auto& to_scale, auto& to_sums) {
      t.quantize(
          {x.data(), cols, to_q.data(), cols, to_scale.data(), to_sums.data(), rows, cols, group},
          nullptr);
    };
    run(*FindTable("reference"), expected_q, expected_scale, expected_sums);
    run(table(), q, scale, sums);
    EXPECT_EQ(q, expected_q) << cols;
    EXPECT_TRUE(SameBits(scale.data(), expected_scale.data(), rows * num_scales)) << cols;
    EXPECT_EQ(sums, expected_sums) << cols;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < cols; ++i) {
        const auto at = static_cast<size_t>(r * cols + i);
        const int64_t scale_at = r * num_scales + i * num_scales / cols;
        const double step = static_cast<double>(scale[static_cast<size_t>(scale_at)]);
        const double bound = 0.5 * step * (1 + 0x1p-15) + static_cast<double>(kQuantizeTiny);
        EXPECT_NEAR(static_cast<double>(q[at]) * step, static_cast<double>(x[at]), bound);
      }
    }
  }
}

TEST_P(QuantizedTest, ARowThatIsNoNumberHasNoScale) {
  for (const float bad : {kNan, kInf, -kInf}) {
    std::vector<float> x(3 * 40, 1.0f);
    x[40 + 17] = bad;
    std::vector<int8_t> q(x.size());
    float scale[3];
    int32_t sums[9];
    table().quantize({x.data(), 40, q.data(), 40, scale, sums, 3, 40}, nullptr);
    EXPECT_TRUE(std::isnan(scale[1]));
    EXPECT_EQ(scale[0], 1.0f / 127.0f);
    EXPECT_EQ(scale[2], 1.0f / 127.0f);
  }
}

TEST_P(QuantizedTest, EmbeddingReadsTheWeightExactly) {
  for (const int bits : {8, 4}) {
    for (const Depth depth : {Depth{96, 32}, Depth{64, 64}}) {
      for (const bool asymmetric : {false, true}) {
        const Problem p({bits, Act::kInt8, 1, 130, depth.k, depth.group_size, asymmetric}, 5);
        const std::vector<int32_t> ids = {0, 129, 64, 63};
        std::vector<float> out(4 * static_cast<size_t>(depth.k));
        EmbeddingArgs args = {};
        args.table = p.w.data();
        args.packed = true;
        args.ids = ids.data();
        args.out = out.data();
        args.ldo = args.cols = depth.k;
        args.rows = 4;
        args.scale = p.packed_scale.data();
        args.zero = asymmetric ? p.packed_zero.data() : nullptr;
        args.group_size = depth.group_size;
        table().embedding[static_cast<int>(bits == 8 ? DType::kUInt8 : DType::kUInt4)](args,
                                                                                       nullptr);
        for (size_t r = 0; r < 4; ++r) {
          for (int64_t k = 0; k < depth.k; ++k) {
            ASSERT_EQ(
                static_cast<double>(out[r * static_cast<size_t>(depth.k) + static_cast<size_t>(k)]),
                p.Weight(k, ids[r]));
          }
        }
      }
    }
  }
}

AS_INSTANTIATE_KERNEL_TEST(QuantizedTest);

}  // namespace
}  // namespace allspark::kernels
