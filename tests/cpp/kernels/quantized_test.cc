// Kernels over quantised weights and activations: every table against sums in double over the
// unpacked integers, and the independence of a row's bits from other rows and from the split.
#include <algorithm>
#include <cmath>
#include <cstring>
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

// What u stands for (WeightScales).
enum class Kind { kInteger, kOffset, kTable, kFloat8 };

struct Shape {
  int bits;
  Act act;
  int64_t m, n, k, group_size;
  bool asymmetric = false, bias = false, accumulate = false;
  int64_t scale_group = 0;  // of int8 activations
  Kind kind = Kind::kInteger;
  ScaleType scales = ScaleType::kBFloat16;
};

DType WeightDType(const Shape& s) {
  if (s.bits != 8) return DType::kUInt4;
  return s.kind == Kind::kFloat8 ? DType::kFloat8E4M3 : DType::kUInt8;
}

std::string Text(const Shape& s) {
  return std::to_string(s.bits) + " bits, activations " + std::to_string(static_cast<int>(s.act)) +
         ", m=" + std::to_string(s.m) + " n=" + std::to_string(s.n) + " k=" + std::to_string(s.k) +
         " group=" + std::to_string(s.group_size) + (s.asymmetric ? " asymmetric" : "") +
         " scale_group=" + std::to_string(s.scale_group) + " kind " +
         std::to_string(static_cast<int>(s.kind)) + " scales " +
         std::to_string(static_cast<int>(s.scales));
}

// Packs stored integers u[k][n] into lanes, following the layout's description; of 6 bits, the
// lower four.
std::vector<uint8_t> PackIntegers(const std::vector<uint8_t>& u, int bits, int64_t k, int64_t n,
                                  int64_t width = kPanelColumns) {
  const int64_t panels = (n + width - 1) / width, per_lane = bits == 8 ? 4 : 8;
  std::vector<uint8_t> packed(static_cast<size_t>(panels * width * k * 4 / per_lane), 0);
  for (int64_t row = 0; row < k; ++row) {
    for (int64_t col = 0; col < n; ++col) {
      const int64_t lane =
          col / width * (k / per_lane) * width + row / per_lane * width + col % width;
      const int64_t at = row % per_lane;
      const uint8_t stored = u[static_cast<size_t>(row * n + col)];
      const auto value = static_cast<uint8_t>(bits == 8 ? stored : stored & 15);
      uint8_t& byte = packed[static_cast<size_t>(lane * 4 + at % 4)];
      byte = static_cast<uint8_t>(byte | (at >= 4 ? value << 4 : value));
    }
  }
  return packed;
}

// The upper two bits of 6.
std::vector<uint8_t> PackHigh(const std::vector<uint8_t>& u, int64_t k, int64_t n) {
  const int64_t panels = (n + kPanelColumns - 1) / kPanelColumns;
  std::vector<uint8_t> packed(static_cast<size_t>(panels * kPanelColumns * k / 4), 0);
  for (int64_t row = 0; row < k; ++row) {
    for (int64_t col = 0; col < n; ++col) {
      const int64_t lane = col / kPanelColumns * (k / 16) * kPanelColumns +
                           row / 16 * kPanelColumns + col % kPanelColumns;
      uint8_t& byte = packed[static_cast<size_t>(lane * 4 + row % 4)];
      const int value = u[static_cast<size_t>(row * n + col)] >> 4;
      byte = static_cast<uint8_t>(byte | value << row % 16 / 4 * 2);
    }
  }
  return packed;
}

// [groups][n] to [ceil(n/width)][groups][width].
template <class T>
std::vector<T> PackGroups(const std::vector<T>& x, int64_t groups, int64_t n,
                          int64_t width = kPanelColumns) {
  const int64_t panels = (n + width - 1) / width;
  std::vector<T> packed(static_cast<size_t>(panels * groups * width), T{});
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t col = 0; col < n; ++col) {
      packed[static_cast<size_t>((col / width * groups + g) * width + col % width)] =
          x[static_cast<size_t>(g * n + col)];
    }
  }
  return packed;
}

struct QuantizedCase {
  Shape shape;
  std::vector<float> x;              // [m][k]: activations before quantisation, or as they are
  std::vector<uint8_t> u, w, high;   // [k][n], and packed
  std::vector<float> scale, offset;  // [groups][n], of the stored type's values
  std::vector<unsigned char> packed_scale, packed_offset;
  std::vector<uint16_t> block_scale, block_offset;
  std::vector<uint8_t> zero, packed_zero;
  std::vector<int8_t> numbers;  // of a table
  std::vector<int8_t> q;
  std::vector<float> a_scale;
  std::vector<int32_t> a_sums;
  std::vector<BFloat16> narrow;
  std::vector<float> bias, c;

  QuantizedCase(const Shape& s, uint32_t seed) : shape(s) {
    Data data(seed);
    x = data.Vector<float>(s.m * s.k);
    u.resize(static_cast<size_t>(s.k * s.n));
    for (uint8_t& e : u) {
      e = static_cast<uint8_t>(data.Below(int64_t{1} << s.bits));
      // No NaN; and more of the subnormals than chance gives.
      if (s.kind == Kind::kFloat8 && (e & 0x7f) == 0x7f) e = 0x7e;
      if (s.kind == Kind::kFloat8 && e % 5 == 0) e &= 0x87;
    }
    const int64_t groups = s.k / s.group_size;
    scale = data.Vector<float>(groups * s.n, s.kind == Kind::kFloat8 ? 1e-4f : 0.01f);
    offset = data.Vector<float>(groups * s.n, 0.1f);
    packed_scale = Store(scale, block_scale, data);
    packed_offset = Store(offset, block_offset, data);
    for (int i = 0; i < 16; ++i) numbers.push_back(static_cast<int8_t>(data.Below(256) - 128));
    numbers[3] = -128, numbers[4] = 127;
    zero.resize(static_cast<size_t>(groups * s.n));
    for (uint8_t& e : zero) e = static_cast<uint8_t>(data.Below(int64_t{1} << s.bits));
    Pack();
    packed_zero = PackGroups(zero, groups, s.n);
    bias = data.Vector<float>(s.n);
    c = data.Vector<float>(s.m * s.n);
    for (const float e : x) narrow.push_back(ToBFloat16(e));
    QuantizeRows();
  }

  void Pack() {
    w = PackIntegers(u, shape.bits, shape.k, shape.n);
    if (shape.bits == 6) high = PackHigh(u, shape.k, shape.n);
  }

  // The packed bytes of scales or offsets; values become what these stand for.
  std::vector<unsigned char> Store(std::vector<float>& values, std::vector<uint16_t>& blocks,
                                   Data& data) const {
    const int64_t groups = shape.k / shape.group_size;
    if (shape.scales == ScaleType::kCode) return StoreCodes(values, blocks, data);
    if (shape.scales == ScaleType::kPower) {
      std::vector<unsigned char> bytes;
      for (float& value : values) {
        bytes.push_back(static_cast<unsigned char>(data.Below(8) == 0 ? 0 : data.Below(12) + 112));
        value = bytes.back() == 0 ? 0.0f : std::ldexp(1.0f, bytes.back() - 127);
      }
      return PackGroups(bytes, groups, shape.n);
    }
    std::vector<uint16_t> bits;
    for (float& value : values) {
      if (shape.scales == ScaleType::kFloat16) {
        bits.push_back(ToFloat16(value).bits);
        value = ToFloat(Float16{bits.back()});
      } else {
        bits.push_back(ToBFloat16(value).bits);
        value = ToFloat(BFloat16{bits.back()});
      }
    }
    const std::vector<uint16_t> packed = PackGroups(bits, groups, shape.n);
    std::vector<unsigned char> bytes(2 * packed.size());
    std::memcpy(bytes.data(), packed.data(), bytes.size());
    return bytes;
  }
  std::vector<unsigned char> StoreCodes(std::vector<float>& values, std::vector<uint16_t>& blocks,
                                        Data& data) const {
    const int64_t groups = shape.k / shape.group_size, num_blocks = shape.k / kScaleBlock;
    std::vector<uint16_t> halves;
    for (const float value : data.Vector<float>(num_blocks * shape.n, 0.0002f)) {
      halves.push_back(ToFloat16(value).bits);
    }
    std::vector<unsigned char> codes;
    for (size_t i = 0; i < values.size(); ++i) {
      codes.push_back(static_cast<unsigned char>(data.Below(256)));
      const int64_t group = static_cast<int64_t>(i) / shape.n * shape.group_size / kScaleBlock;
      const int64_t at = group * shape.n + static_cast<int64_t>(i) % shape.n;
      values[i] = static_cast<float>(codes.back() - 128) *
                  ToFloat(Float16{halves[static_cast<size_t>(at)]});
    }
    blocks = PackGroups(halves, num_blocks, shape.n);
    return PackGroups(codes, groups, shape.n);
  }

  WeightScales Scales() const {
    WeightScales scales;
    scales.scale = packed_scale.data();
    scales.zero = shape.asymmetric ? packed_zero.data() : nullptr;
    scales.offset = shape.kind == Kind::kOffset ? packed_offset.data() : nullptr;
    scales.table = shape.kind == Kind::kTable ? numbers.data() : nullptr;
    scales.high = shape.bits == 6 ? high.data() : nullptr;
    scales.block_scale = block_scale.empty() ? nullptr : block_scale.data();
    scales.block_offset = scales.offset == nullptr ? nullptr : block_offset.data();
    scales.group_size = shape.group_size;
    scales.type = shape.scales;
    return scales;
  }

  int64_t NumScales() const { return RowScales(shape.k, shape.scale_group); }

  void QuantizeRows() {
    q.resize(x.size());
    a_scale.resize(static_cast<size_t>(shape.m * NumScales()));
    a_sums.resize(static_cast<size_t>(shape.m * RowSums(shape.k)));
    QuantizeArgs args = {x.data(),      shape.k, q.data(), shape.k,          a_scale.data(),
                         a_sums.data(), shape.m, shape.k,  shape.scale_group};
    Reference().quantize(args);
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
    args.scales = Scales();
    if (shape.act == Act::kInt8) {
      args.a_scale = a_scale.data() + row_begin * NumScales();
      args.a_scale_group = shape.scale_group;
      args.a_sums = a_sums.data() + row_begin * RowSums(shape.k);
    }
    return args;
  }

  auto Gemm(const KernelTable& table) const {
    return table.gemm[static_cast<int>(WeightDType(shape))][static_cast<int>(DTypeOf(shape.act))];
  }
  void Run(const KernelTable& table, std::vector<float>& out, int64_t begin, int64_t rows) const {
    Gemm(table)(Args(out, begin, rows));
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
  size_t GroupAt(int64_t k, int64_t n) const {
    return static_cast<size_t>(k / shape.group_size * shape.n + n);
  }
  double Offset(int64_t k, int64_t n) const {
    return shape.kind == Kind::kOffset ? static_cast<double>(offset[GroupAt(k, n)]) : 0.0;
  }
  // Without its offset.
  double Scaled(int64_t k, int64_t n) const {
    const uint8_t stored = u[static_cast<size_t>(k * shape.n + n)];
    const int z = shape.asymmetric ? zero[GroupAt(k, n)] : 1 << (shape.bits - 1);
    const double number = shape.kind == Kind::kFloat8   ? E4M3(stored)
                          : shape.kind == Kind::kTable  ? numbers[stored]
                          : shape.kind == Kind::kOffset ? stored
                                                        : stored - z;
    return number * static_cast<double>(scale[GroupAt(k, n)]);
  }
  double Weight(int64_t k, int64_t n) const { return Scaled(k, n) + Offset(k, n); }

  // By its definition: 4 bits of exponent with bias 7, 3 of fraction.
  static double E4M3(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
    return code < 128 ? magnitude : -magnitude;
  }
};

void ExpectCorrect(const KernelTable& table, const QuantizedCase& p) {
  SCOPED_TRACE(Text(p.shape));
  const Shape& s = p.shape;
  const std::vector<float> out = p.Run(table);
  std::vector<double> scaled, offset;  // [k][n]
  for (int64_t k = 0; k < s.k; ++k) {
    for (int64_t n = 0; n < s.n; ++n) {
      scaled.push_back(p.Scaled(k, n));
      offset.push_back(p.Offset(k, n));
    }
  }
  // Beside the k products and sums: a conversion, the scales of each group (a product, and a
  // product and a sum in one), the row's or the column's scale. As many again of offsets.
  const int64_t group = s.scale_group == 0 ? s.group_size : std::min(s.group_size, s.scale_group);
  const int64_t terms = s.k + 4 * (s.k / group) + 3;
  const auto width = static_cast<size_t>(s.n);
  for (int64_t m = 0; m < s.m; ++m) {
    std::vector<double> sum(width), sum_abs(width);
    const auto add = [&](size_t n, double term) {
      sum[n] += term;
      sum_abs[n] += std::fabs(term);
    };
    for (int64_t k = 0; k < s.k; ++k) {
      const double activation = p.Activation(m, k);
      const size_t row = static_cast<size_t>(k) * width;
      for (size_t n = 0; n < width; ++n) {
        add(n, activation * scaled[row + n]);
        if (s.kind == Kind::kOffset) add(n, activation * offset[row + n]);
      }
    }
    for (size_t n = 0; n < width; ++n) {
      const size_t at = static_cast<size_t>(m) * width + n;
      if (s.bias) add(n, static_cast<double>(p.bias[n]));
      if (s.accumulate) add(n, static_cast<double>(p.c[at]));
      ASSERT_NEAR(static_cast<double>(out[at]), sum[n], DotBound(terms, sum_abs[n]))
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

// Offsets, tables, 6 bits, floats of 8 bits, groups of 16, scales of every type.
void AddForms(std::vector<Shape>& shapes) {
  int index = 0;
  const auto add = [&](int bits, Kind kind, Act act, Depth depth, int64_t scale_group,
                       bool codes = false) {
    const ScaleType types[] = {ScaleType::kFloat16, ScaleType::kBFloat16, ScaleType::kPower};
    const ScaleType type =
        codes ? ScaleType::kCode : types[index % (kind == Kind::kOffset ? 2 : 3)];
    const int64_t rows[] = {1, 2, 3, 4, 6, 7, 13, 100};
    const int64_t columns[] = {1, 16, 17, 64, 65, 130};
    shapes.push_back({bits, act, rows[index % 8], columns[index % 6], depth.k, depth.group_size,
                      false, index % 3 == 0, index % 5 == 0, scale_group, kind, type});
    ++index;
  };
  const std::pair<int, Kind> forms[] = {
      {6, Kind::kInteger}, {6, Kind::kOffset},  {4, Kind::kTable},  {4, Kind::kOffset},
      {8, Kind::kOffset},  {4, Kind::kInteger}, {8, Kind::kInteger}};
  const Depth depths[] = {{16, 16},  {96, 16},   {32, 32},    {256, 32},
                          {576, 64}, {1088, 16}, {1152, 128}, {2304, 32}};
  for (const auto& [bits, kind] : forms) {
    for (const Depth depth : depths) {
      for (const Act act : {Act::kInt8, Act::kFloat32, Act::kBFloat16}) {
        add(bits, kind, act, depth, 0);
      }
      for (const int64_t scale_group : {32, 64}) {
        if (depth.k % scale_group == 0) add(bits, kind, Act::kInt8, depth, scale_group);
      }
    }
    for (const Depth depth : {Depth{256, 32}, {768, 16}, {512, 128}, {2304, 64}}) {
      for (const Act act : {Act::kInt8, Act::kFloat32, Act::kBFloat16}) {
        add(bits, kind, act, depth, 0, /*codes=*/true);
      }
      for (const int64_t scale_group : {32, 64}) {
        add(bits, kind, Act::kInt8, depth, scale_group, /*codes=*/true);
      }
    }
  }
  for (const Depth depth : {Depth{4, 4}, {40, 40}, {96, 16}, {512, 128}, {1336, 1336}, {640, 64}}) {
    for (const Act act : {Act::kFloat32, Act::kBFloat16}) add(8, Kind::kFloat8, act, depth, 0);
  }
}

std::vector<Shape> Shapes() {
  std::vector<Shape> shapes;
  AddForms(shapes);
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
  for (const Shape& shape : Shapes()) ExpectCorrect(table(), QuantizedCase(shape, seed++));
}

TEST_P(QuantizedTest, ARowDependsOnNoOther) {
  for (Shape shape : Shapes()) {
    if (shape.n > 70) continue;
    shape.m = 20;
    SCOPED_TRACE(Text(shape));
    const QuantizedCase p(shape, 7);
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

// More rows than any table takes together.
TEST_P(QuantizedTest, ManyRowsGiveTheBitsOfFew) {
  std::vector<Shape> shapes;
  for (const int bits : {8, 4}) {
    for (const bool zeros : {false, true}) {
      for (const Act act : {Act::kInt8, Act::kBFloat16}) {
        for (const Depth depth : {Depth{1152, 64}, {1152, 1152}, {640, 32}, {2048, 1024}}) {
          const int64_t scale_group = act == Act::kInt8 ? 64 : 0;
          shapes.push_back(
              {bits, act, 290, 66, depth.k, depth.group_size, zeros, true, false, scale_group});
        }
      }
    }
  }
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(Text(shape));
    const QuantizedCase p(shape, 8);
    const std::vector<float> whole = p.Run(table());
    for (const auto& [begin, rows] : {std::pair<int64_t, int64_t>{0, 1}, {250, 20}, {289, 1}}) {
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
      const QuantizedCase p({bits, act, 8, 300, 192, 64, true, true, true}, 12);
      const std::vector<float> whole = p.Run(table());
      std::vector<float> split = p.c;
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{3, 5}, {0, 1}, {1, 1}, {1, 3}}) {
        GemmArgs args = p.Args(split, 0, 8);
        args.panel_begin = begin;
        args.panel_end = end;
        p.Gemm(table())(args);
      }
      EXPECT_TRUE(SameBits(whole.data(), split.data(), static_cast<int64_t>(whole.size())));
    }
  }
}

TEST_P(QuantizedTest, PanelsMayBeCutIntoStrips) {
  for (Shape shape : Shapes()) {
    shape.m = std::min(shape.m, kMostStripRows);
    SCOPED_TRACE(Text(shape));
    const QuantizedCase p(shape, 12);
    const std::vector<float> whole = p.Run(table());
    std::vector<float> split = p.c;
    ForStrips(p.Args(split, 0, shape.m), p.Gemm(table()));
    ASSERT_TRUE(SameBits(whole.data(), split.data(), static_cast<int64_t>(whole.size())));
  }
}

TEST_P(QuantizedTest, NarrowPanelsGiveTheSameBits) {
  for (Shape shape : Shapes()) {
    if (shape.bits != 8 || shape.act != Act::kInt8 || shape.group_size != shape.k ||
        shape.kind != Kind::kInteger || shape.scales != ScaleType::kBFloat16) {
      continue;
    }
    shape.asymmetric = false;
    SCOPED_TRACE(Text(shape));
    const QuantizedCase p(shape, 5);
    const std::vector<uint8_t> w =
        PackIntegers(p.u, 8, shape.k, shape.n, /*width=*/kNarrowPanelColumns);
    std::vector<uint16_t> scales;
    for (const float scale : p.scale) scales.push_back(ToBFloat16(scale).bits);
    scales = PackGroups(scales, 1, shape.n, /*width=*/kNarrowPanelColumns);
    std::vector<float> out = p.c;
    GemmArgs args = p.Args(out, 0, shape.m);
    args.w = w.data();
    args.scales.scale = scales.data();
    args.panel_columns = kNarrowPanelColumns;
    const int64_t panels = (shape.n + kNarrowPanelColumns - 1) / kNarrowPanelColumns;
    for (args.panel_begin = 0; args.panel_begin < panels; args.panel_begin = args.panel_end) {
      args.panel_end = std::min(args.panel_begin + 2, panels);
      p.Gemm(table())(args);
    }
    EXPECT_TRUE(SameBits(out.data(), p.Run(table()).data(), static_cast<int64_t>(out.size())));
  }
}

// As GemmTest.AdaptersGoOnWithTheSums: the bits of a weight with the adapter's rows of k appended.
TEST_P(QuantizedTest, AdaptersGoOnWithTheSums) {
  const int64_t k = 128, n = 190, first_row = 5;
  for (const auto& [m, rank] :
       {std::pair<int64_t, int64_t>{1, 32}, {4, 32}, {7, 32}, {7, 1056}, {20, 32}, {130, 32}}) {
    const QuantizedCase whole(Shape{.bits = 8,
                                    .act = Act::kInt8,
                                    .m = m,
                                    .n = n,
                                    .k = k + rank,
                                    .group_size = kSumBlock,
                                    .bias = true,
                                    .accumulate = true,
                                    .scale_group = kSumBlock},
                              static_cast<uint32_t>(m));
    const auto gemm = whole.Gemm(table());
    const auto rows_of = [&](const auto& x, int64_t begin, int64_t count) {
      return std::decay_t<decltype(x)>(x.begin() + begin * n, x.begin() + (begin + count) * n);
    };
    const auto scales_of = [&](int64_t begin, int64_t count) {
      std::vector<uint16_t> scales;
      for (const float scale : rows_of(whole.scale, begin / kSumBlock, count / kSumBlock)) {
        scales.push_back(ToBFloat16(scale).bits);
      }
      return PackGroups(scales, count / kSumBlock, n);
    };
    const auto columns_of = [&](const auto& x, int64_t columns, int64_t count) {
      std::decay_t<decltype(x)> kept;
      for (auto row = x.begin(); row != x.end(); row += columns) {
        kept.insert(kept.end(), row, row + count);
      }
      return kept;
    };
    const std::vector<uint8_t> w = PackIntegers(rows_of(whole.u, 0, k), 8, k, n);
    const std::vector<uint8_t> b = PackIntegers(rows_of(whole.u, k, rank), 8, rank, n);
    const std::vector<uint16_t> w_scale = scales_of(0, k), b_scale = scales_of(k, rank);
    const int64_t ld_scales = whole.NumScales(), ld_sums = RowSums(k + rank);
    const std::vector<float> a_scale = columns_of(whole.a_scale, ld_scales, k / kSumBlock);
    const std::vector<int32_t> a_sums = columns_of(whole.a_sums, ld_sums, RowSums(k));
    std::vector<float> plain = whole.c, out = whole.c;
    const std::vector<float> adapted = whole.Run(table());
    GemmArgs args = whole.Args(plain, 0, m);
    args.w = w.data();
    args.k = k;
    args.scales.scale = w_scale.data();
    args.a_scale = a_scale.data();
    args.a_sums = a_sums.data();
    gemm(args);
    // Of all rows but the last, and panels 1 and 2.
    const int64_t end = m == 1 ? 1 : m - 1;
    const LowRank low = {.row_begin = first_row,
                         .row_end = first_row + end,
                         .panel_begin = 1,
                         .panel_end = 3,
                         .a = whole.q.data() + k - first_row * (k + rank),
                         .lda = k + rank,
                         .b = b.data() + rank * kPanelColumns,
                         .k = rank,
                         .dtype = DType::kInt8,
                         .a_scale = whole.a_scale.data() + k / kSumBlock - first_row * ld_scales,
                         .ld_scales = ld_scales,
                         .a_sums = whole.a_sums.data() + k / kSumBlock - first_row * ld_sums,
                         .ld_sums = ld_sums,
                         .b_scale = b_scale.data() + rank / kSumBlock * kPanelColumns};
    args.c = out.data();
    args.low_rank = &low;
    args.num_low_rank = 1;
    args.add_low_rank = table().low_rank[static_cast<int>(DType::kInt8)];
    args.first_row = first_row;
    gemm(args);
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t column = 0; column < n; ++column) {
        const auto at = static_cast<size_t>(row * n + column);
        const float expected = row < end && column >= kPanelColumns ? adapted[at] : plain[at];
        // As there: two roundings more in the reference, of results below 64.
        const double bound = &table() == &Reference() ? 2 * 0x1p-24 * 64 : 0;
        ASSERT_NEAR(static_cast<double>(out[at]), static_cast<double>(expected), bound)
            << "m=" << m << " row " << row << " column " << column;
      }
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
        const QuantizedCase p({bits, act, m, 2 * cols, 192, 64, true, true}, 21);
        std::vector<float> both = p.Run(table());
        std::vector<float> expected(static_cast<size_t>(m * cols)), out(expected.size());
        table().gated_act[kSlotOf<float>](
            {both.data(), 2 * cols, expected.data(), cols, m, cols, Activation::kSilu});
        GemmGatedArgs args = {p.Args(both, 0, m), out.data(), cols, DType::kFloat32,
                              Activation::kSilu};
        args.gemm.panel_end = 2;
        gated(args);
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
    const QuantizedCase p(shape, seed++);
    const std::vector<float> expected = p.Run(*first), out = p.Run(table());
    ASSERT_TRUE(SameBits(expected.data(), out.data(), static_cast<int64_t>(out.size())))
        << Text(shape);
  }
}

// Extreme values: products that overflow 16 bits, and sums that overflow 32 bits before the zero
// point is subtracted.
TEST_P(QuantizedTest, TheLargestIntegersAreExact) {
  for (const int bits : {8, 4}) {
    for (const int64_t m : {1, 3, 7}) {
      for (const float value : {-1.0f, 1.0f}) {
        QuantizedCase p({bits, Act::kInt8, m, 64, 4096, 4096, true}, 3);
        std::fill(p.u.begin(), p.u.end(), bits == 8 ? 255 : 15);
        std::fill(p.packed_zero.begin(), p.packed_zero.end(), 0);
        std::fill(p.zero.begin(), p.zero.end(), 0);
        std::fill(p.x.begin(), p.x.end(), value);
        p.Pack();
        p.QuantizeRows();
        ExpectCorrect(table(), p);
      }
    }
  }
}

// Two products of six bits, and two more, are close to what 16 bits hold.
TEST_P(QuantizedTest, TheLargestIntegersOf6BitsAreExact) {
  for (const int64_t m : {1, 3, 7}) {
    for (const float value : {-1.0f, 1.0f}) {
      QuantizedCase p({6, Act::kInt8, m, 64, 1152, 128}, 3);
      std::fill(p.u.begin(), p.u.end(), 63);
      std::fill(p.x.begin(), p.x.end(), value);
      p.Pack();
      p.QuantizeRows();
      ExpectCorrect(table(), p);
    }
  }
}

// Every code of float8, exactly.
TEST_P(QuantizedTest, EveryFloatOf8BitsIsExact) {
  QuantizedCase p({8, Act::kBFloat16, 1, 256, 4, 4, false, false, false, 0, Kind::kFloat8}, 9);
  for (size_t i = 0; i < p.u.size(); ++i) {
    const auto code = static_cast<uint8_t>(i % 256);
    p.u[i] = i < 256 && (code & 0x7f) != 0x7f ? code : 0;
  }
  p.Pack();
  std::fill(p.narrow.begin(), p.narrow.end(), ToBFloat16(1.0f));
  const std::vector<float> out = p.Run(table());
  for (int64_t n = 0; n < 256; ++n) {
    EXPECT_EQ(static_cast<double>(out[static_cast<size_t>(n)]), p.Weight(0, n)) << n;
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
          {x.data(), cols, to_q.data(), cols, to_scale.data(), to_sums.data(), rows, cols, group});
    };
    run(Reference(), expected_q, expected_scale, expected_sums);
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
    std::vector<int32_t> sums(static_cast<size_t>(3 * RowSums(40)));
    table().quantize({x.data(), 40, q.data(), 40, scale, sums.data(), 3, 40});
    EXPECT_TRUE(std::isnan(scale[1]));
    EXPECT_EQ(scale[0], 1.0f / 127.0f);
    EXPECT_EQ(scale[2], 1.0f / 127.0f);
  }
}

TEST_P(QuantizedTest, EmbeddingReadsTheWeightExactly) {
  std::vector<Shape> shapes = Shapes();
  for (const int bits : {8, 4}) shapes.push_back({bits, Act::kInt8, 1, 1, 96, 32, true});
  for (Shape shape : shapes) {
    shape.m = 1;   // its activations are not read
    shape.n = 66;  // two panels, the last one partial
    SCOPED_TRACE(Text(shape));
    const QuantizedCase p(shape, 5);
    const std::vector<int32_t> ids = {0, 65, 64, 63};
    std::vector<float> out(4 * static_cast<size_t>(shape.k));
    EmbeddingArgs args = {};
    args.table = p.w.data();
    args.packed = true;
    args.ids = ids.data();
    args.out = out.data();
    args.ldo = args.cols = shape.k;
    args.rows = 4;
    args.scales = p.Scales();
    table().embedding[static_cast<int>(WeightDType(shape))](args);
    for (size_t r = 0; r < 4; ++r) {
      for (int64_t k = 0; k < shape.k; ++k) {
        const float found = out[r * static_cast<size_t>(shape.k) + static_cast<size_t>(k)];
        const double product = p.Scaled(k, ids[r]), offset = p.Offset(k, ids[r]);
        // Exact without an offset, unless a scale is a product itself, of 18 bits; otherwise the
        // product and the sum are rounded.
        const bool exact = offset == 0 && shape.scales != ScaleType::kCode;
        const double bound = exact ? 0.0 : 0x1p-23 * (std::fabs(product) + std::fabs(offset));
        ASSERT_NEAR(static_cast<double>(found), product + offset, bound) << k;
      }
    }
  }
}

AS_INSTANTIATE_KERNEL_TEST(QuantizedTest);

}  // namespace
}  // namespace allspark::kernels
