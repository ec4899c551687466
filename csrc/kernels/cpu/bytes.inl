// Dot products of unsigned bytes (weights) and signed bytes (activations), four to a 32-bit lane,
// exact in int32. On x86 they use the VNNI instruction; without it, pairs16.inl has the products.
// Arm's products without I8MM take two signed or two unsigned operands, so kByteBias is first
// subtracted from the weights. The start value of the sum corrects for this (StartGroup in
// quantized.inl).
#pragma once

// Include a vec_*.h before this file.

namespace allspark::kernels {
namespace {

// The four bytes at `a`, in memory order.
static AS_ALWAYS_INLINE int32_t FourBytes(const int8_t* a) {
  int32_t fours;
  __builtin_memcpy(&fours, a, 4);
  return fours;
}

#if defined(__aarch64__)
using ByteRow = int8x16_t;
static AS_ALWAYS_INLINE ByteRow BroadcastBytes(const int8_t* a) {
  return vreinterpretq_s8_s32(vdupq_n_s32(FourBytes(a)));
}
#if defined(AS_KERNELS_NATIVE_I8MM)
constexpr int32_t kByteBias = 0;
static AS_ALWAYS_INLINE VecI BiasBytes(VecI u) { return u; }
static AS_ALWAYS_INLINE VecI DotBytes(VecI acc, VecI u, ByteRow a) {
  return AsUnsigned(vusdotq_s32(AsSigned(acc), vreinterpretq_u8_u32(u), a));
}
#else
constexpr int32_t kByteBias = 128;
static AS_ALWAYS_INLINE VecI BiasBytes(VecI u) {
  return vreinterpretq_u32_u8(veorq_u8(vreinterpretq_u8_u32(u), vdupq_n_u8(0x80)));
}
static AS_ALWAYS_INLINE VecI DotBytes(VecI acc, VecI u, ByteRow a) {
  const int8x16_t w = vreinterpretq_s8_u32(u);
#if defined(AS_KERNELS_NATIVE_SDOT)
  return AsUnsigned(vdotq_s32(AsSigned(acc), w, a));
#else
  // Sums of two products fit 16 bits: 2 * 128 * 127.
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a));
  const int16x8_t high = vmull_high_s8(w, a);
  return AsUnsigned(vpadalq_s16(AsSigned(acc), vpaddq_s16(low, high)));
#endif
}
#endif
#else
constexpr int32_t kByteBias = 0;
static AS_ALWAYS_INLINE VecI BiasBytes(VecI u) { return u; }
using ByteRow = VecI;
static AS_ALWAYS_INLINE ByteRow BroadcastBytes(const int8_t* a) { return Set1Int(FourBytes(a)); }
#if defined(AS_KERNELS_NATIVE_VNNI)
static AS_ALWAYS_INLINE VecI DotBytes(VecI acc, VecI u, ByteRow a) {
  return AddDotBytes(acc, u, a);
}
#else
#define AS_BYTES_IN_PAIRS16 1  // no DotBytes
#endif
#endif

// The low and the high half of each byte.
static AS_ALWAYS_INLINE VecI LowNibbles(VecI x) { return And(x, Set1Int(0x0f0f0f0f)); }
static AS_ALWAYS_INLINE VecI HighNibbles(VecI x) {
  return And(ShiftRight<4>(x), Set1Int(0x0f0f0f0f));
}

}  // namespace
}  // namespace allspark::kernels
