// Dot products of unsigned bytes (weights) and signed bytes (activations), four to a 32-bit lane,
// exact in int32: by the VNNI instruction, or by products of 16-bit halves.
#pragma once

// After a vec_*.h.

namespace allspark::kernels {
namespace {

#if defined(AS_KERNELS_NATIVE_VNNI)
struct ByteRow {
  VecI fours;
};
AS_ALWAYS_INLINE ByteRow BroadcastBytes(const int8_t* a) {
  int32_t fours;
  __builtin_memcpy(&fours, a, 4);
  return {Set1Int(fours)};
}
AS_ALWAYS_INLINE VecI DotBytes(VecI acc, VecI u, ByteRow a) {
  return _mm512_dpbusd_epi32(acc, u, a.fours);
}
#else
// Bytes 0 and 2 of each lane, and bytes 1 and 3, widened to 16 bits.
struct ByteRow {
  VecI even, odd;
};
AS_ALWAYS_INLINE ByteRow BroadcastBytes(const int8_t* a) {
  int32_t fours;
  __builtin_memcpy(&fours, a, 4);
  const VecI x = Set1Int(fours);
  return {ShiftRightSigned16(ShiftLeft16(x)), ShiftRightSigned16(x)};
}
AS_ALWAYS_INLINE VecI DotBytes(VecI acc, VecI u, ByteRow a) {
  const VecI even = DotPairs16(And(u, Set1Int(0x00ff00ff)), a.even);
  return AddInt(acc, AddInt(even, DotPairs16(ShiftRight16(u), a.odd)));
}
#endif

// The low and the high half of each byte.
AS_ALWAYS_INLINE VecI LowNibbles(VecI x) { return And(x, Set1Int(0x0f0f0f0f)); }
AS_ALWAYS_INLINE VecI HighNibbles(VecI x) { return And(ShiftRight<4>(x), Set1Int(0x0f0f0f0f)); }

}  // namespace
}  // namespace allspark::kernels
