#include "weights/packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "weights/format.h"

namespace allspark::weights {
namespace {

// Four 32-bit lanes: every baseline CPU has them (SSE2, NEON). Wider vectors gained nothing: memory
// is the limit.
typedef uint16_t U16x4 __attribute__((vector_size(8)));
typedef uint16_t U16x8 __attribute__((vector_size(16)));
typedef uint32_t U32x4 __attribute__((vector_size(16)));
typedef int32_t I32x4 __attribute__((vector_size(16)));
typedef float F32x4 __attribute__((vector_size(16)));

inline constexpr int64_t kLanesPerVector = 4;

template <typename V>
inline V Load(const unsigned char* at) {
  V value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

struct UInt8;
struct UInt4;
struct UInt2;

// The float32 bits of four consecutive elements.
template <typename Src>
inline U32x4 LoadQuad(const unsigned char* at);

template <>
inline U32x4 LoadQuad<float>(const unsigned char* at) {
  return Load<U32x4>(at);
}

template <>
inline U32x4 LoadQuad<BFloat16>(const unsigned char* at) {
  return __builtin_convertvector(Load<U16x4>(at), U32x4) << 16;
}

// Exact, and independent of the thread's flush-to-zero mode: no operand or result is a float32
// subnormal.
template <>
inline U32x4 LoadQuad<Float16>(const unsigned char* at) {
  const U32x4 half = __builtin_convertvector(Load<U16x4>(at), U32x4);
  const U32x4 shifted = (half & 0x7fffu) << 13;
  const U32x4 exponent = shifted & 0x0f800000u;
  const auto is_special = reinterpret_cast<U32x4>(exponent == 0x0f800000u);
  const auto is_subnormal = reinterpret_cast<U32x4>(exponent == 0u);
  const U32x4 rebased = shifted + 0x38000000u;
  const U32x4 normal = rebased + (is_special & 0x38000000u);
  const U32x4 subnormal =
      reinterpret_cast<U32x4>(reinterpret_cast<F32x4>(rebased + 0x00800000u) - 6.103515625e-05f);
  const U32x4 magnitude = (is_subnormal & subnormal) | (~is_subnormal & normal);
  return magnitude | ((half & 0x8000u) << 16);
}

// Lanes whose magnitude is above `limit`, as all-ones.
inline U32x4 Above(U32x4 bits, int32_t limit) {
  return reinterpret_cast<U32x4>(reinterpret_cast<I32x4>(bits & 0x7fffffffu) > limit);
}

// float32 bits to the nearest even Dst, in the lower half. Not for what rounds to infinity, or NaN:
// magnitudes above kLargest.
template <typename Dst>
struct Rounding;

template <>
struct Rounding<BFloat16> {
  static constexpr int32_t kLargest = 0x7f7f7fff;
  static inline U32x4 Round(U32x4 bits) { return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; }
};

template <>
struct Rounding<Float16> {
  static constexpr int32_t kLargest = 0x477fefff;
  static inline U32x4 Round(U32x4 bits) {
    const U32x4 magnitude = bits & 0x7fffffffu;
    const U32x4 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    // Below 2^-14: as ToFloat16.
    const U32x4 subnormal =
        reinterpret_cast<U32x4>(reinterpret_cast<F32x4>(magnitude) + 0.5f) - 0x3f000000u;
    const U32x4 is_normal = Above(bits, 0x387fffff);
    return (is_normal & normal) | (~is_normal & subnormal) | ((bits & 0x80000000u) >> 16);
  }
};

// Loads four output lanes; ors into `bad` the lanes that must not be stored.
template <typename Src, typename Dst>
struct LaneLoader {
  static constexpr int64_t kElementsPerLane = kLaneBytes / static_cast<int64_t>(sizeof(Dst));
  static constexpr int64_t kSourceBytesPerLane =
      kElementsPerLane * static_cast<int64_t>(sizeof(Src));

  static inline U32x4 LoadLanes(const unsigned char* at, U32x4& bad) {
    if constexpr (sizeof(Dst) == 4) {
      const U32x4 bits = LoadQuad<Src>(at);
      bad |= Above(bits, 0x7f7fffff);
      return bits;
    } else {
      constexpr int32_t kLargest = Rounding<Dst>::kLargest;
      const U32x4 low = LoadQuad<Src>(at);
      const U32x4 high = LoadQuad<Src>(at + 4 * sizeof(Src));
      bad |= Above(low, kLargest) | Above(high, kLargest);
      const auto a = reinterpret_cast<U16x8>(Rounding<Dst>::Round(low));
      const auto b = reinterpret_cast<U16x8>(Rounding<Dst>::Round(high));
      return reinterpret_cast<U32x4>(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14));
    }
  }
};

// As they are. kSpecial: the exponent of infinity and NaN.
template <uint16_t kSpecial>
inline U32x4 CopyPairs(const unsigned char* at, U32x4& bad) {
  const U16x8 bits = Load<U16x8>(at);
  bad |= reinterpret_cast<U32x4>((bits & kSpecial) == kSpecial);
  return reinterpret_cast<U32x4>(bits);
}
template <>
inline U32x4 LaneLoader<BFloat16, BFloat16>::LoadLanes(const unsigned char* at, U32x4& bad) {
  return CopyPairs<0x7f80>(at, bad);
}
template <>
inline U32x4 LaneLoader<Float16, Float16>::LoadLanes(const unsigned char* at, U32x4& bad) {
  return CopyPairs<0x7c00>(at, bad);
}

// Four bytes to a lane, as they are.
template <>
struct LaneLoader<UInt8, UInt8> {
  static constexpr int64_t kSourceBytesPerLane = 4;
  static inline U32x4 LoadLanes(const unsigned char* at, U32x4& /*bad*/) { return Load<U32x4>(at); }
};

// Eight bytes to a lane: the first four become its low nibbles, the last four its high nibbles.
template <>
struct LaneLoader<UInt8, UInt4> {
  static constexpr int64_t kSourceBytesPerLane = 8;
  static inline U32x4 LoadLanes(const unsigned char* at, U32x4& bad) {
    const U32x4 a = Load<U32x4>(at);
    const U32x4 b = Load<U32x4>(at + sizeof(a));
    const U32x4 low = __builtin_shufflevector(a, b, 0, 2, 4, 6);
    const U32x4 high = __builtin_shufflevector(a, b, 1, 3, 5, 7);
    bad |= (low | high) & 0xf0f0f0f0u;
    return low | (high << 4);
  }
};

// Four codes to a lane, none of them NaN.
template <>
struct LaneLoader<UInt8, Float8E4M3> {
  static constexpr int64_t kSourceBytesPerLane = 4;
  static inline U32x4 LoadLanes(const unsigned char* at, U32x4& bad) {
    const U32x4 codes = Load<U32x4>(at);
    // A magnitude of 127, plus one, carries into the sign's place.
    bad |= ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    return codes;
  }
};

// Sixteen bytes to a lane: bits 2 i and 2 i + 1 of its byte j are byte 4 i + j.
template <>
struct LaneLoader<UInt8, UInt2> {
  static constexpr int64_t kSourceBytesPerLane = 16;
  static inline U32x4 LoadLanes(const unsigned char* at, U32x4& bad) {
    U32x4 lanes = {};
    for (int64_t lane = 0; lane < kLanesPerVector; ++lane) {
      const U32x4 fours = Load<U32x4>(at + lane * kSourceBytesPerLane);
      bad |= fours & 0xfcfcfcfcu;
      lanes[lane] = fours[0] | fours[1] << 2 | fours[2] << 4 | fours[3] << 6;
    }
    return lanes;
  }
};

inline bool NoneSet(U32x4 mask) { return (mask[0] | mask[1] | mask[2] | mask[3]) == 0; }

// Loads the last lanes of a row, where a whole vector would read past the source.
template <typename Loader>
inline U32x4 LoadLastLanes(const unsigned char* at, int64_t source_bytes, U32x4& bad) {
  alignas(16) unsigned char padded[kLanesPerVector * Loader::kSourceBytesPerLane] = {};
  std::memcpy(padded, at, static_cast<size_t>(source_bytes));
  return Loader::LoadLanes(padded, bad);
}

template <typename Src, typename Dst>
bool ConvertRun(const unsigned char* src, int64_t count, unsigned char* dst) {
  using Loader = LaneLoader<Src, Dst>;
  constexpr int64_t kStep = kLanesPerVector * Loader::kElementsPerLane;
  U32x4 bad = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const U32x4 lanes = Loader::LoadLanes(src + i * static_cast<int64_t>(sizeof(Src)), bad);
    std::memcpy(dst + i * static_cast<int64_t>(sizeof(Dst)), &lanes, sizeof(lanes));
  }
  if (i < count) {
    const int64_t rest = count - i;
    const U32x4 lanes = LoadLastLanes<Loader>(src + i * static_cast<int64_t>(sizeof(Src)),
                                              rest * static_cast<int64_t>(sizeof(Src)), bad);
    std::memcpy(dst + i * static_cast<int64_t>(sizeof(Dst)), &lanes,
                static_cast<size_t>(rest) * sizeof(Dst));
  }
  return NoneSet(bad);
}

inline void StoreTransposed(const U32x4 (&row)[4], unsigned char* dst) {
  const U32x4 ab_low = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
  const U32x4 ab_high = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
  const U32x4 cd_low = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
  const U32x4 cd_high = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
  const U32x4 column[4] = {__builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5),
                           __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
                           __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
                           __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
  for (int64_t lane = 0; lane < 4; ++lane) {
    std::memcpy(dst + lane * kSlotBytes, &column[lane], sizeof(column[lane]));
  }
}

// One row, lane by lane.
template <typename Loader>
inline void PackRow(const unsigned char* src, int64_t lanes, unsigned char* dst, U32x4& bad) {
  for (int64_t lane = 0; lane < lanes; lane += kLanesPerVector) {
    const unsigned char* at = src + lane * Loader::kSourceBytesPerLane;
    const int64_t valid = std::min(lanes - lane, kLanesPerVector);
    const U32x4 values = valid == kLanesPerVector
                             ? Loader::LoadLanes(at, bad)
                             : LoadLastLanes<Loader>(at, valid * Loader::kSourceBytesPerLane, bad);
    for (int64_t i = 0; i < valid; ++i) {
      const uint32_t value = values[i];
      std::memcpy(dst + (lane + i) * kSlotBytes, &value, sizeof(value));
    }
  }
}

template <typename Src, typename Dst>
bool PackTile(const unsigned char* src, int64_t row_stride, int64_t rows, int64_t lanes,
              unsigned char* dst) {
  using Loader = LaneLoader<Src, Dst>;
  // A block's output, 64 slots of 256 bytes, stays in the first-level cache while all rows are
  // scattered to it; a row's part of a block is whole cache lines, read once.
  constexpr int64_t kBlockLanes = 64;
  U32x4 bad = {};
  for (int64_t begin = 0; begin < lanes; begin += kBlockLanes) {
    const int64_t block = std::min(kBlockLanes, lanes - begin);
    const int64_t vector_lanes = block - block % kLanesPerVector;
    const unsigned char* block_src = src + begin * Loader::kSourceBytesPerLane;
    unsigned char* block_dst = dst + begin * kSlotBytes;
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      const unsigned char* row_src[4];
      for (int64_t i = 0; i < 4; ++i) row_src[i] = block_src + (r + i) * row_stride;
      for (int64_t lane = 0; lane < vector_lanes; lane += kLanesPerVector) {
        U32x4 row[4];
        for (int64_t i = 0; i < 4; ++i) {
          row[i] = Loader::LoadLanes(row_src[i] + lane * Loader::kSourceBytesPerLane, bad);
        }
        StoreTransposed(row, block_dst + lane * kSlotBytes + r * kLaneBytes);
      }
      for (int64_t i = 0; i < 4 && vector_lanes < block; ++i) {
        PackRow<Loader>(row_src[i] + vector_lanes * Loader::kSourceBytesPerLane,
                        block - vector_lanes,
                        block_dst + vector_lanes * kSlotBytes + (r + i) * kLaneBytes, bad);
      }
    }
    for (; r < rows; ++r) {
      PackRow<Loader>(block_src + r * row_stride, block, block_dst + r * kLaneBytes, bad);
    }
  }
  return NoneSet(bad);
}

// Scales and zero points are few: element by element is fast enough.
template <ConvertRunFn kConvert, int64_t kSourceBytes, int64_t kStoredBytes>
bool PackElements(const unsigned char* src, int64_t row_stride, int64_t rows, int64_t lanes,
                  unsigned char* dst) {
  bool ok = true;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      ok &= kConvert(src + r * row_stride + lane * kSourceBytes, 1,
                     dst + (lane * kPanelColumns + r) * kStoredBytes);
    }
  }
  return ok;
}

bool CopyBytes(const unsigned char* src, int64_t count, unsigned char* dst) {
  std::memcpy(dst, src, static_cast<size_t>(count));
  return true;
}

bool CopyInts(const unsigned char* src, int64_t count, unsigned char* dst) {
  return CopyBytes(src, count * static_cast<int64_t>(sizeof(int32_t)), dst);
}

template <typename Src>
Packer PackerFrom(DType stored) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Src));
  if (stored == DType::kFloat32) {
    return {ConvertRun<Src, float>, PackTile<Src, float>, nullptr, kBytes};
  }
  if (stored == DType::kBFloat16) {
    return {ConvertRun<Src, BFloat16>, PackTile<Src, BFloat16>,
            PackElements<ConvertRun<Src, BFloat16>, kBytes, 2>, kBytes};
  }
  if (stored == DType::kFloat16) {
    return {ConvertRun<Src, Float16>, PackTile<Src, Float16>,
            PackElements<ConvertRun<Src, Float16>, kBytes, 2>, kBytes};
  }
  return {};
}

}  // namespace

Packer FindPacker(DType source, DType stored) {
  switch (source) {
    case DType::kFloat32:
      return PackerFrom<float>(stored);
    case DType::kFloat16:
      return PackerFrom<Float16>(stored);
    case DType::kBFloat16:
      return PackerFrom<BFloat16>(stored);
    case DType::kUInt8:
      if (stored == DType::kUInt8) {
        return {CopyBytes, PackTile<UInt8, UInt8>, PackElements<CopyBytes, 1, 1>, 1};
      }
      if (stored == DType::kUInt4) return {nullptr, PackTile<UInt8, UInt4>, nullptr, 1};
      if (stored == DType::kUInt2) return {nullptr, PackTile<UInt8, UInt2>, nullptr, 1};
      if (stored == DType::kFloat8E4M3) {
        return {nullptr, PackTile<UInt8, Float8E4M3>, nullptr, 1};
      }
      return {};
    case DType::kInt32:
      if (stored == DType::kInt32) return {CopyInts, nullptr, nullptr, sizeof(int32_t)};
      return {};
    default:
      return {};
  }
}

float ReadElement(const unsigned char* src, DType source) {
  if (source == DType::kUInt8) return *src;
  float value = 0.0f;
  const Packer packer = FindPacker(source, DType::kFloat32);
  if (packer.convert_run != nullptr) {
    (void)packer.convert_run(src, 1, reinterpret_cast<unsigned char*>(&value));
  }
  return value;
}

bool CanStore(float value, DType stored) {
  if (stored == DType::kUInt4) return value <= 15.0f;
  if (stored == DType::kUInt2) return value <= 3.0f;
  if (stored == DType::kFloat8E4M3) return value != 127.0f && value != 255.0f;  // codes: NaN
  if (stored == DType::kFloat16) return std::isfinite(ToFloat(ToFloat16(value)));
  return std::isfinite(stored == DType::kBFloat16 ? ToFloat(ToBFloat16(value)) : value);
}

}  // namespace allspark::weights
