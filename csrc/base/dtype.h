// Element types and the 16-bit float scalars. Plain data: kernels and ISA files include this,
// so nothing here may emit a weak symbol (every function is always inlined).
#pragma once

#include <cstdint>
#include <cstring>

#define AS_ALWAYS_INLINE static inline __attribute__((always_inline))

namespace allspark {

// Values are stored in files. They are DashInfer's, except 13 and 14, which are this project's.
enum class DType : int32_t {
  kUndefined = 0,
  kFloat32 = 1,
  kFloat16 = 2,
  kInt8 = 3,
  kInt16 = 4,
  kInt32 = 5,
  kInt64 = 6,
  kBool = 8,
  kBFloat16 = 9,
  kUInt8 = 10,
  kFloat8E4M3 = 11,
  kFloat8E5M2 = 12,
  kUInt4 = 13,
  kInt8UInt4 = 14,  // of a KV cache alone: keys int8, values uint4
};
inline constexpr int kNumDTypes = 16;

// bfloat16: the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

AS_ALWAYS_INLINE float ToFloat(BFloat16 x) {
  uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Rounds to nearest, ties to even; NaN stays NaN (quiet).
AS_ALWAYS_INLINE BFloat16 ToBFloat16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

}  // namespace allspark
