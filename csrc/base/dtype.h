// Element types and the float scalars of 16 and 8 bits. Plain data: kernels and ISA files include
// this, so nothing here may emit a weak symbol (every function is always inlined).
#pragma once

#include <cstdint>
#include <cstring>

// For functions that are compiled anew for each instruction set: with `static`, so that no other
// file gets one for a newer processor.
#define AS_ALWAYS_INLINE inline __attribute__((always_inline))

namespace allspark {

// Values are stored in files. They are DashInfer's, except those from 13 on.
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
  kUInt2 = 15,      // in files alone: the upper bits of 6-bit integers
};
inline constexpr int kNumDTypes = 16;

// bfloat16: the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

static AS_ALWAYS_INLINE float ToFloat(BFloat16 x) {
  uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Rounds to nearest, ties to even; NaN stays NaN (quiet).
static AS_ALWAYS_INLINE BFloat16 ToBFloat16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

// IEEE half precision.
struct Float16 {
  uint16_t bits;
};

// The float32 of a smaller float: `bits` are its magnitude's, with the exponent rebased. That of a
// subnormal is then one too small: its fraction counts from the least normal number on, which is
// subtracted.
static AS_ALWAYS_INLINE float FromRebased(uint32_t bits, bool is_subnormal, float least,
                                          bool negative) {
  if (is_subnormal) bits += 0x00800000u;
  float f;
  std::memcpy(&f, &bits, 4);
  if (is_subnormal) f -= least;
  return negative ? -f : f;
}

static AS_ALWAYS_INLINE float ToFloat(Float16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  // Exponents are rebased from 15 to 127; those of infinity and NaN once more.
  const uint32_t rebase = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;
  return FromRebased((magnitude << 13) + rebase, magnitude < 0x400u, 0x1p-14f, x.bits >> 15 != 0);
}

// Rounds to nearest, ties to even; large magnitudes to infinity; NaN stays NaN (quiet).
static AS_ALWAYS_INLINE Float16 ToFloat16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const auto sign = static_cast<uint16_t>(u >> 16 & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (u >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (u < 0x38800000u) {
    // Below 2^-14: added to 0.5, whose last bit is 2^-24, it is rounded to a whole number of them.
    std::memcpy(&f, &u, 4);
    f += 0.5f;
    std::memcpy(&u, &f, 4);
    return {static_cast<uint16_t>(sign | (u - 0x3f000000u))};
  }
  u += 0xfffu + (u >> 13 & 1u);
  return {static_cast<uint16_t>(sign | ((u - 0x38000000u) >> 13))};
}

// FP8 E4M3 of the OCP specification: 4 bits of exponent, bias 7; no infinities; 0x7f is NaN.
struct Float8E4M3 {
  uint8_t bits;
};

// Not for NaN, for which it returns 480 or -480.
static AS_ALWAYS_INLINE float ToFloat(Float8E4M3 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  return FromRebased((magnitude << 20) + 0x3c000000u, magnitude < 8, 0x1p-6f, x.bits >> 7 != 0);
}

}  // namespace allspark
