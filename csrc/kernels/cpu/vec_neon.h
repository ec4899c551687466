// A vector of 4 float lanes on 64-bit Arm: the same operations as vec_avx2.h, which explains each
// name. Uses what every such processor has; with BF16, also the dot product of pairs.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernels/args.h"

namespace allspark::kernels {
namespace {

constexpr int kLanes = 4;
constexpr int kRegisters = 32;
// At most 24 of 32 registers are accumulators. A single row takes a whole panel of 64 columns:
// fewer accumulators would not cover the multipliers' latency.
constexpr int kTileRows = 6;
constexpr int TileVecs(int rows) { return rows == 1 ? 16 : rows <= 3 ? 8 : 4; }

using VecF = float32x4_t;
using VecI = uint32x4_t;  // unsigned, since its sums may wrap
using Mask = uint32x4_t;  // all ones where set

static AS_ALWAYS_INLINE VecF Set1(float x) { return vdupq_n_f32(x); }
static AS_ALWAYS_INLINE VecF Zero() { return Set1(0.0f); }
static AS_ALWAYS_INLINE VecF LoadF(const float* p) { return vld1q_f32(p); }
static AS_ALWAYS_INLINE void StoreF(float* p, VecF x) { vst1q_f32(p, x); }
static AS_ALWAYS_INLINE VecF AsFloat(VecI x) { return vreinterpretq_f32_u32(x); }
static AS_ALWAYS_INLINE VecI AsInt(VecF x) { return vreinterpretq_u32_f32(x); }
static AS_ALWAYS_INLINE int32x4_t AsSigned(VecI x) { return vreinterpretq_s32_u32(x); }
static AS_ALWAYS_INLINE VecI AsUnsigned(int32x4_t x) { return vreinterpretq_u32_s32(x); }
static AS_ALWAYS_INLINE VecI LoadI(const void* p) {
  return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
}
static AS_ALWAYS_INLINE void StoreI(void* p, VecI x) {
  vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_u32(x));
}

static AS_ALWAYS_INLINE Mask RangeMask(int64_t first, int64_t begin, int64_t end) {
  const int32x4_t lane = int32x4_t{0, 1, 2, 3} + vdupq_n_s32(static_cast<int32_t>(first));
  return vandq_u32(vcgeq_s32(lane, vdupq_n_s32(static_cast<int32_t>(begin))),
                   vcltq_s32(lane, vdupq_n_s32(static_cast<int32_t>(end))));
}
static AS_ALWAYS_INLINE Mask FirstLanes(int64_t n) {
  return RangeMask(0, 0, n < kLanes ? n : kLanes);
}
static AS_ALWAYS_INLINE bool IsWhole(Mask m) { return vminvq_u32(m) != 0; }
// Arm has no masked accesses: full masks use plain loads and stores, others go lane by lane.
static AS_ALWAYS_INLINE VecI MaskLoadI(Mask m, const void* p) {
  if (IsWhole(m)) return LoadI(p);
  uint32_t set[kLanes], lanes[kLanes] = {};
  StoreI(set, m);
  for (int i = 0; i < kLanes; ++i) {
    if (set[i] != 0) __builtin_memcpy(lanes + i, static_cast<const char*>(p) + 4 * i, 4);
  }
  return LoadI(lanes);
}
static AS_ALWAYS_INLINE void MaskStoreI(Mask m, void* p, VecI x) {
  if (IsWhole(m)) return StoreI(p, x);
  uint32_t set[kLanes], lanes[kLanes];
  StoreI(set, m);
  StoreI(lanes, x);
  for (int i = 0; i < kLanes; ++i) {
    if (set[i] != 0) __builtin_memcpy(static_cast<char*>(p) + 4 * i, lanes + i, 4);
  }
}
static AS_ALWAYS_INLINE VecF MaskLoadF(Mask m, const float* p) { return AsFloat(MaskLoadI(m, p)); }
static AS_ALWAYS_INLINE void MaskStoreF(Mask m, float* p, VecF x) { MaskStoreI(m, p, AsInt(x)); }

static AS_ALWAYS_INLINE VecF Fma(VecF a, VecF b, VecF c) { return vfmaq_f32(c, a, b); }
static AS_ALWAYS_INLINE VecF Add(VecF a, VecF b) { return vaddq_f32(a, b); }
static AS_ALWAYS_INLINE VecF Sub(VecF a, VecF b) { return vsubq_f32(a, b); }
static AS_ALWAYS_INLINE VecF Mul(VecF a, VecF b) { return vmulq_f32(a, b); }
static AS_ALWAYS_INLINE VecF Div(VecF a, VecF b) { return vdivq_f32(a, b); }
static AS_ALWAYS_INLINE VecF Sqrt(VecF a) { return vsqrtq_f32(a); }
static AS_ALWAYS_INLINE Mask Less(VecF a, VecF b) { return vcltq_f32(a, b); }
static AS_ALWAYS_INLINE VecF Select(Mask m, VecF yes, VecF no) { return vbslq_f32(m, yes, no); }
// The instructions are not used: they return NaN where either operand is NaN, or the other operand.
static AS_ALWAYS_INLINE VecF Max(VecF a, VecF b) { return Select(Less(b, a), a, b); }
static AS_ALWAYS_INLINE VecF Min(VecF a, VecF b) { return Select(Less(a, b), a, b); }
static AS_ALWAYS_INLINE VecF Neg(VecF a) { return vnegq_f32(a); }
static AS_ALWAYS_INLINE VecF Abs(VecF a) { return vabsq_f32(a); }
static AS_ALWAYS_INLINE uint32_t EqualBits(VecF a, VecF b) {
  return vaddvq_u32(vandq_u32(vceqq_f32(a, b), uint32x4_t{1, 2, 4, 8}));
}

static AS_ALWAYS_INLINE float FirstLane(VecF x) { return vgetq_lane_f32(x, 0); }
static AS_ALWAYS_INLINE float ReduceAdd(VecF x) {
  const VecF s = Add(x, vextq_f32(x, x, 2));
  return FirstLane(Add(s, vextq_f32(s, s, 1)));
}
static AS_ALWAYS_INLINE float ReduceMax(VecF x) {
  const VecF s = Max(x, vextq_f32(x, x, 2));
  return FirstLane(Max(s, vextq_f32(s, s, 1)));
}

static AS_ALWAYS_INLINE VecI RoundToInt(VecF x) { return AsUnsigned(vcvtnq_s32_f32(x)); }
static AS_ALWAYS_INLINE VecF IntToFloat(VecI x) { return vcvtq_f32_s32(AsSigned(x)); }
static AS_ALWAYS_INLINE VecI SubInt(VecI a, VecI b) { return vsubq_u32(a, b); }
static AS_ALWAYS_INLINE VecI AddInt(VecI a, VecI b) { return vaddq_u32(a, b); }
static AS_ALWAYS_INLINE VecI MulInt(VecI a, VecI b) { return vmulq_u32(a, b); }
static AS_ALWAYS_INLINE VecI And(VecI a, VecI b) { return vandq_u32(a, b); }
static AS_ALWAYS_INLINE VecI Or(VecI a, VecI b) { return vorrq_u32(a, b); }
static AS_ALWAYS_INLINE VecI AndNot(VecI a, VecI b) { return vbicq_u32(b, a); }
static AS_ALWAYS_INLINE VecI Set1Int(int32_t x) { return AsUnsigned(vdupq_n_s32(x)); }
template <int N>
static AS_ALWAYS_INLINE VecI ShiftRight(VecI x) {
  if constexpr (N == 0) {
    return x;
  } else {
    return vshrq_n_u32(x, N);
  }
}
template <int N>
static AS_ALWAYS_INLINE VecI ShiftRightSigned(VecI x) {
  return AsUnsigned(vshrq_n_s32(AsSigned(x), N));
}
template <int N>
static AS_ALWAYS_INLINE VecI ShiftLeft(VecI x) {
  return vshlq_n_u32(x, N);
}
static AS_ALWAYS_INLINE VecI DotPairs16(VecI a, VecI b) {
  const int16x8_t x = vreinterpretq_s16_u32(a), y = vreinterpretq_s16_u32(b);
  return AsUnsigned(vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
}
static AS_ALWAYS_INLINE VecI SubPairs16(VecI a, VecI b) {
  return vreinterpretq_u32_u16(vsubq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
static AS_ALWAYS_INLINE VecI AddPairs16(VecI a, VecI b) {
  return vreinterpretq_u32_u16(vaddq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
template <int N>
static AS_ALWAYS_INLINE VecI ShiftRightSignedPairs16(VecI x) {
  return vreinterpretq_u32_s16(vshrq_n_s16(vreinterpretq_s16_u32(x), N));
}
static AS_ALWAYS_INLINE VecI ZeroPairs16(VecI x) {
  return vreinterpretq_u32_u16(vceqzq_u16(vreinterpretq_u16_u32(x)));
}
static AS_ALWAYS_INLINE bool AnyZeroPairs16(VecI x) {
  return vminvq_u16(vreinterpretq_u16_u32(x)) == 0;
}
static AS_ALWAYS_INLINE VecI LoadTable(const uint8_t* p) { return LoadI(p); }
static AS_ALWAYS_INLINE VecI LookUp(VecI table, VecI at) {
  return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(table), vreinterpretq_u8_u32(at)));
}
static AS_ALWAYS_INLINE int32_t ReduceAddInt(VecI x) { return vaddvq_s32(AsSigned(x)); }
static AS_ALWAYS_INLINE VecF PowerOf2(VecI n) {
  return AsFloat(ShiftLeft<23>(AddInt(n, Set1Int(127))));
}
static AS_ALWAYS_INLINE VecF RoundToWhole(VecF x) { return vrndnq_f32(x); }
// As in vec_avx512.h.
static AS_ALWAYS_INLINE VecF ScaleByPowerOf2(VecF x, VecF n) {
  const VecI whole = RoundToInt(vrndmq_f32(Max(Set1(-200.0f), n)));
  const VecI half = ShiftRightSigned<1>(whole);
  return Mul(Mul(x, PowerOf2(half)), PowerOf2(SubInt(whole, half)));
}

static AS_ALWAYS_INLINE VecI LoadBytes(const uint8_t* p) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, p, 4);
  return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes)))));
}
static AS_ALWAYS_INLINE VecI LoadBytePairs(const void* p) {
  return vreinterpretq_u32_s16(vmovl_s8(vld1_s8(static_cast<const int8_t*>(p))));
}
static AS_ALWAYS_INLINE void StoreInt16(int16_t* p, VecI x) {
  vst1_s16(p, vqmovn_s32(AsSigned(x)));
}
static AS_ALWAYS_INLINE void StoreInt8(int8_t* p, VecI x) {
  const int16x4_t words = vqmovn_s32(AsSigned(x));
  const int8x8_t bytes = vqmovn_s16(vcombine_s16(words, words));
  const uint32_t lanes = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
  __builtin_memcpy(p, &lanes, 4);
}

static AS_ALWAYS_INLINE VecF PairLow(VecI x) { return AsFloat(ShiftLeft<16>(x)); }
static AS_ALWAYS_INLINE VecF PairHigh(VecI x) { return AsFloat(And(x, Set1Int(-65536))); }
static AS_ALWAYS_INLINE VecF HalfLow(VecI x) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(x)));
}
static AS_ALWAYS_INLINE VecF HalfHigh(VecI x) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(x, 16)));
}
static AS_ALWAYS_INLINE VecI RoundBf16(VecF x) {
  const VecI u = AsInt(x);
  const VecI top = ShiftRight<16>(u);
  const VecI up = AddInt(AddInt(u, Set1Int(0x7fff)), And(top, Set1Int(1)));
  return vbslq_u32(vceqq_f32(x, x), ShiftRight<16>(up), Or(top, Set1Int(0x40)));
}
static AS_ALWAYS_INLINE VecI PackPairs(VecF low, VecF high) {
  return Or(RoundBf16(low), ShiftLeft<16>(RoundBf16(high)));
}
static AS_ALWAYS_INLINE VecF LoadBf16(const uint16_t* p) {
  return AsFloat(ShiftLeft<16>(vmovl_u16(vld1_u16(p))));
}
static AS_ALWAYS_INLINE VecF LoadHalf(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static AS_ALWAYS_INLINE void StoreBf16(uint16_t* p, VecF x) {
  vst1_u16(p, vmovn_u32(RoundBf16(x)));
}

static AS_ALWAYS_INLINE void Deinterleave(VecF first, VecF second, VecF* x, VecF* y) {
  *x = vuzp1q_f32(first, second);
  *y = vuzp2q_f32(first, second);
}
static AS_ALWAYS_INLINE void Interleave(VecF x, VecF y, VecF* first, VecF* second) {
  *first = vzip1q_f32(x, y);
  *second = vzip2q_f32(x, y);
}

#if defined(AS_KERNELS_NATIVE_BF16)
static AS_ALWAYS_INLINE VecF DotBf16(VecF acc, VecI a, VecI b) {
  return vbfdotq_f32(acc, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}
static AS_ALWAYS_INLINE void StoreBf16Quickly(uint16_t* p, VecF x) {
  vst1_u16(p, vreinterpret_u16_bf16(vcvt_bf16_f32(x)));
}
static AS_ALWAYS_INLINE void StoreBf16Quickly(uint16_t* p, VecF first, VecF second) {
  vst1q_u16(p, vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second)));
}
#define AS_VEC_HAS_FRACTION 1
static AS_ALWAYS_INLINE VecF Fraction(VecF x) {
  const VecF finite = Max(Set1(-200.0f), x);
  return Sub(finite, vrndmq_f32(finite));
}
#endif

}  // namespace
}  // namespace allspark::kernels
