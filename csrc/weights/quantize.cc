#include "weights/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "platform/float_mode.h"
#include "weights/format.h"
#include "weights/packing.h"

namespace allspark::weights {
namespace {

// Four lanes, as in packing.cc: every baseline CPU has them.
typedef float F32x4 __attribute__((vector_size(16)));
typedef int32_t I32x4 __attribute__((vector_size(16)));
typedef uint8_t U8x4 __attribute__((vector_size(4)));
typedef double F64x4 __attribute__((vector_size(32)));
constexpr int64_t kVector = 4;

// Elements converted to float32 at a time: longer groups are converted once per pass.
constexpr int64_t kBlock = 8192;

// Groups below the smallest normal number count as zero, and no scale is below twice that number.
// So no result depends on subnormal quotients or products, which some instructions flush to zero.
constexpr double kMinNormal = 0x1p-126;
constexpr double kMinScale = 0x1p-125;

// 1.5 * 2^23: adding it to a float32 of magnitude below 2^22 rounds that float to the nearest
// integer, ties to even. The low bits of the sum then hold the integer.
constexpr float kRounder = 12582912.0f;
constexpr int32_t kRounderBits = 0x4b400000;

// value = q * scale for integers q in [low, high]; q + zero is stored.
struct Grid {
  BFloat16 scale = {};
  int32_t low = 0;
  int32_t high = 0;
  int32_t zero = 0;
};

inline F32x4 Broadcast(float x) { return F32x4{x, x, x, x}; }

inline F32x4 Load(const float* at) {
  F32x4 v;
  std::memcpy(&v, at, sizeof(v));
  return v;
}

// The elements of one group as float32, block by block.
class GroupReader {
 public:
  explicit GroupReader(DType source) : convert_(FindPacker(source, DType::kFloat32)) {}

  int64_t source_bytes() const { return convert_.source_bytes; }
  void Open(const unsigned char* src, int64_t count) {
    src_ = src;
    count_ = count;
    resident_ = false;
  }
  // Calls fn(values, count, offset of the first value in the group); false if a value is not
  // finite.
  template <typename Fn>
  bool ForEachBlock(Fn fn) {
    bool finite = true;
    for (int64_t begin = 0; begin < count_; begin += kBlock) {
      const int64_t count = std::min(kBlock, count_ - begin);
      if (!resident_) {
        finite &= convert_.convert_run(src_ + begin * convert_.source_bytes, count,
                                       reinterpret_cast<unsigned char*>(buffer_));
      }
      fn(static_cast<const float*>(buffer_), count, begin);
    }
    resident_ = count_ <= kBlock;
    return finite;
  }

 private:
  const Packer convert_;
  const unsigned char* src_ = nullptr;
  int64_t count_ = 0;
  bool resident_ = false;  // buffer_ holds the whole group
  alignas(16) float buffer_[kBlock];
};

struct Range {
  float low = 0.0f;   // min(0, smallest)
  float high = 0.0f;  // max(0, largest)
};

Range RangeOf(GroupReader& group, bool& finite) {
  F32x4 low = {};
  F32x4 high = {};
  finite &= group.ForEachBlock([&](const float* values, int64_t count, int64_t) {
    for (int64_t i = 0; i < count; i += kVector) {
      const F32x4 v = Load(values + i);
      low = v < low ? v : low;
      high = v > high ? v : high;
    }
  });
  return {std::min(std::min(low[0], low[1]), std::min(low[2], low[3])),
          std::max(std::max(high[0], high[1]), std::max(high[2], high[3]))};
}

// The smallest bfloat16 that is not below x, so that no value of the range behind x clips.
BFloat16 ScaleAbove(double x) {
  x = std::max(x, kMinScale);
  const auto nearest = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &nearest, sizeof(bits));
  BFloat16 scale{static_cast<uint16_t>(bits >> 16)};
  if (static_cast<double>(ToFloat(scale)) < x) ++scale.bits;
  return scale;
}

// values / scale, clamped to [low, high], plus kRounder. `exact` gets the quotient before clamping.
inline F32x4 Quotients(const float* values, F32x4 scale, F32x4 low, F32x4 high, F32x4& exact) {
  exact = Load(values) / scale;
  const F32x4 above = exact > low ? exact : low;
  return (above < high ? above : high) + kRounder;
}

// The sum of the squared errors of quantising the values to the grid.
double SquaredError(GroupReader& group, const Grid& grid) {
  const F32x4 scale = Broadcast(ToFloat(grid.scale));
  const F32x4 low = Broadcast(static_cast<float>(grid.low));
  const F32x4 high = Broadcast(static_cast<float>(grid.high));
  F64x4 sum = {};
  (void)group.ForEachBlock([&](const float* values, int64_t count, int64_t) {
    for (int64_t i = 0; i < count; i += kVector) {
      F32x4 exact;
      const F32x4 rounded = Quotients(values + i, scale, low, high, exact) - kRounder;
      const F64x4 error = __builtin_convertvector(exact - rounded, F64x4);
      sum += error * error;
    }
  });
  const double step = ToFloat(grid.scale);
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) * step * step;
}

void StoreValues(GroupReader& group, const Grid& grid, unsigned char* dst) {
  const F32x4 scale = Broadcast(ToFloat(grid.scale));
  const F32x4 low = Broadcast(static_cast<float>(grid.low));
  const F32x4 high = Broadcast(static_cast<float>(grid.high));
  const int32_t offset = grid.zero - kRounderBits;
  (void)group.ForEachBlock([&](const float* values, int64_t count, int64_t begin) {
    for (int64_t i = 0; i < count; i += kVector) {
      F32x4 exact;
      const F32x4 sums = Quotients(values + i, scale, low, high, exact);
      const auto stored = __builtin_convertvector(reinterpret_cast<I32x4>(sums) + offset, U8x4);
      std::memcpy(dst + begin + i, &stored, sizeof(stored));
    }
  });
}

Grid AsymmetricGrid(const Range& range, int32_t bits) {
  const int32_t top = (1 << bits) - 1;
  const double width = static_cast<double>(range.high) - static_cast<double>(range.low);
  const BFloat16 scale = ScaleAbove(width / top);
  const float sum = -range.low / ToFloat(scale) + kRounder;
  const auto zero = std::min(static_cast<int32_t>(sum - kRounder), top);
  return {scale, -zero, top - zero, zero};
}

Grid SymmetricGrid(GroupReader& group, const Range& range, int32_t bits) {
  const double largest = std::max(-range.low, range.high);
  const int32_t zero = SymmetricZero(bits);
  const Grid even{ScaleAbove(largest / (zero - 1)), 1 - zero, zero - 1, zero};
  if (bits != 4) return even;
  // The even grid leaves one of 16 values unused. This grid uses it on the side of the largest
  // weight: the step is finer, but the other side may clip.
  Grid full{ScaleAbove(largest / zero), -zero, zero - 1, zero};
  if (range.high > -range.low) full.scale.bits |= 0x8000;
  return SquaredError(group, full) < SquaredError(group, even) ? full : even;
}

// Parts of the range that a search tries: 1 - step / 20.
constexpr int32_t kSearchSteps = 12;

// The grid of a part of the range: weights beyond it clip, and the others lie closer to a value.
Grid NarrowedGrid(const Grid& full, const Range& range, float part, const QuantFormat& format) {
  const BFloat16 scale = ToBFloat16(ToFloat(full.scale) * part);
  const int32_t top = (1 << format.bits) - 1;
  if (!format.asymmetric) return {scale, -full.zero, top - full.zero, full.zero};
  const float sum = -range.low * part / ToFloat(scale) + kRounder;
  const auto zero = std::min(static_cast<int32_t>(sum - kRounder), top);
  return {scale, -zero, top - zero, zero};
}

Grid SearchedGrid(GroupReader& group, const Range& range, const Grid& full,
                  const QuantFormat& format) {
  Grid best = full;
  double least = SquaredError(group, full);
  for (int32_t step = 1; step <= kSearchSteps; ++step) {
    const float part = 1.0f - static_cast<float>(step) / 20.0f;
    const Grid grid = NarrowedGrid(full, range, part, format);
    if (std::abs(static_cast<double>(ToFloat(grid.scale))) < kMinScale) break;
    const double error = SquaredError(group, grid);
    if (error < least) {
      best = grid;
      least = error;
    }
  }
  return best;
}

}  // namespace

bool QuantizeRow(const unsigned char* src, DType source, int64_t cols, const QuantFormat& format,
                 unsigned char* values, BFloat16* scales, unsigned char* zeros) {
  const DefaultFloatMode mode;
  GroupReader group(source);
  bool finite = true;
  for (int64_t begin = 0; begin < cols; begin += format.group_size) {
    group.Open(src + begin * group.source_bytes(), format.group_size);
    const Range range = RangeOf(group, finite);
    finite &= range.high <= kMaxQuantizable && range.low >= -kMaxQuantizable;
    if (!finite) return false;
    Grid grid;
    if (std::max(-range.low, range.high) < kMinNormal) {
      grid.zero = format.asymmetric ? 0 : SymmetricZero(format.bits);
      std::memset(values + begin, grid.zero, static_cast<size_t>(format.group_size));
    } else {
      grid = format.asymmetric ? AsymmetricGrid(range, format.bits)
                               : SymmetricGrid(group, range, format.bits);
      if (format.search && format.bits == 4) grid = SearchedGrid(group, range, grid, format);
      StoreValues(group, grid, values + begin);
    }
    *scales++ = grid.scale;
    if (zeros != nullptr) *zeros++ = static_cast<unsigned char>(grid.zero);
  }
  return finite;
}

}  // namespace allspark::weights
