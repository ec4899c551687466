// A vector of 8 float lanes on AVX2 with FMA: the operations that the CPU kernels are written in.
// vec_avx512.h has the same names with 16 lanes, vec_neon.h with 4; each ISA file includes one of
// the three before the kernels. Everything is inlined and has internal linkage: no symbol may be
// visible outside its object file.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/args.h"

namespace allspark::kernels {
namespace {

constexpr int kLanes = 8;
constexpr int kRegisters = 16;
// The most rows of a GEMM register tile, and the accumulator vectors per row for each number of
// rows. At most 12 accumulators leave 4 of the 16 registers for operands.
constexpr int kTileRows = 6;
constexpr int TileVecs(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

using VecF = __m256;
using VecI = __m256i;  // 8 lanes of 32 bits: integers, or pairs of bfloat16
using Mask = __m256i;  // all ones where set

static AS_ALWAYS_INLINE VecF Zero() { return _mm256_setzero_ps(); }
static AS_ALWAYS_INLINE VecF Set1(float x) { return _mm256_set1_ps(x); }
static AS_ALWAYS_INLINE VecF LoadF(const float* p) { return _mm256_loadu_ps(p); }
static AS_ALWAYS_INLINE void StoreF(float* p, VecF x) { _mm256_storeu_ps(p, x); }

// Lanes i with begin <= first + i < end.
static AS_ALWAYS_INLINE Mask RangeMask(int64_t first, int64_t begin, int64_t end) {
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                        _mm256_set1_epi32(static_cast<int>(first)));
  const __m256i from = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(static_cast<int>(begin) - 1));
  const __m256i to = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(end)), lane);
  return _mm256_and_si256(from, to);
}
static AS_ALWAYS_INLINE Mask FirstLanes(int64_t n) {
  return RangeMask(0, 0, n < kLanes ? n : kLanes);
}
// Memory of lanes outside the mask is not accessed; these lanes read as zero.
static AS_ALWAYS_INLINE VecF MaskLoadF(Mask m, const float* p) { return _mm256_maskload_ps(p, m); }
static AS_ALWAYS_INLINE void MaskStoreF(Mask m, float* p, VecF x) { _mm256_maskstore_ps(p, m, x); }

static AS_ALWAYS_INLINE VecF Fma(VecF a, VecF b, VecF c) { return _mm256_fmadd_ps(a, b, c); }
static AS_ALWAYS_INLINE VecF Add(VecF a, VecF b) { return _mm256_add_ps(a, b); }
static AS_ALWAYS_INLINE VecF Sub(VecF a, VecF b) { return _mm256_sub_ps(a, b); }
static AS_ALWAYS_INLINE VecF Mul(VecF a, VecF b) { return _mm256_mul_ps(a, b); }
static AS_ALWAYS_INLINE VecF Div(VecF a, VecF b) { return _mm256_div_ps(a, b); }
static AS_ALWAYS_INLINE VecF Sqrt(VecF a) { return _mm256_sqrt_ps(a); }
// The second operand where either is NaN.
static AS_ALWAYS_INLINE VecF Max(VecF a, VecF b) { return _mm256_max_ps(a, b); }
static AS_ALWAYS_INLINE VecF Min(VecF a, VecF b) { return _mm256_min_ps(a, b); }
static AS_ALWAYS_INLINE VecF Neg(VecF a) { return _mm256_xor_ps(a, Set1(-0.0f)); }
static AS_ALWAYS_INLINE VecF Abs(VecF a) { return _mm256_andnot_ps(Set1(-0.0f), a); }
static AS_ALWAYS_INLINE Mask Less(VecF a, VecF b) {
  return _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
// Bit i is set where a and b are equal in lane i.
static AS_ALWAYS_INLINE uint32_t EqualBits(VecF a, VecF b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
}
static AS_ALWAYS_INLINE VecF Select(Mask m, VecF yes, VecF no) {
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(m));
}

// Fixed order: halves, then quarters, then adjacent lanes.
static AS_ALWAYS_INLINE float ReduceAdd(VecF x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
static AS_ALWAYS_INLINE float ReduceMax(VecF x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
static AS_ALWAYS_INLINE float FirstLane(VecF x) { return _mm256_cvtss_f32(x); }

static AS_ALWAYS_INLINE VecI RoundToInt(VecF x) { return _mm256_cvtps_epi32(x); }
static AS_ALWAYS_INLINE VecF IntToFloat(VecI x) { return _mm256_cvtepi32_ps(x); }
static AS_ALWAYS_INLINE VecI SubInt(VecI a, VecI b) { return _mm256_sub_epi32(a, b); }
static AS_ALWAYS_INLINE VecI AddInt(VecI a, VecI b) { return _mm256_add_epi32(a, b); }
static AS_ALWAYS_INLINE VecI MulInt(VecI a, VecI b) { return _mm256_mullo_epi32(a, b); }
static AS_ALWAYS_INLINE VecI And(VecI a, VecI b) { return _mm256_and_si256(a, b); }
static AS_ALWAYS_INLINE VecI Or(VecI a, VecI b) { return _mm256_or_si256(a, b); }
// ~a & b.
static AS_ALWAYS_INLINE VecI AndNot(VecI a, VecI b) { return _mm256_andnot_si256(a, b); }
static AS_ALWAYS_INLINE VecI Set1Int(int32_t x) { return _mm256_set1_epi32(x); }
template <int N>
static AS_ALWAYS_INLINE VecI ShiftRight(VecI x) {
  return _mm256_srli_epi32(x, N);
}
template <int N>
static AS_ALWAYS_INLINE VecI ShiftRightSigned(VecI x) {
  return _mm256_srai_epi32(x, N);
}
template <int N>
static AS_ALWAYS_INLINE VecI ShiftLeft(VecI x) {
  return _mm256_slli_epi32(x, N);
}
// Shifts each 16-bit half of a lane by 8 bits.
static AS_ALWAYS_INLINE VecI ShiftLeft16(VecI x) { return _mm256_slli_epi16(x, 8); }
static AS_ALWAYS_INLINE VecI ShiftRight16(VecI x) { return _mm256_srli_epi16(x, 8); }
static AS_ALWAYS_INLINE VecI ShiftRightSigned16(VecI x) { return _mm256_srai_epi16(x, 8); }
// Per lane, the sum of the products of its 16-bit halves.
static AS_ALWAYS_INLINE VecI DotPairs16(VecI a, VecI b) { return _mm256_madd_epi16(a, b); }
// Adds to 32-bit lanes, or to their 16-bit halves. As intrinsics, GCC adds products up before it
// adds them to the sums, for which registers do not suffice, and moves sums from one register to
// another and back.
static AS_ALWAYS_INLINE void AddTo(VecI& sum, VecI x) {
  __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x));
}
static AS_ALWAYS_INLINE void AddToPairs16(VecI& sum, VecI x) {
  __asm__("vpaddw %1, %0, %0" : "+x"(sum) : "x"(x));
}
// Per 16-bit half, the sum of the products of its two bytes: unsigned ones of u, signed ones of s.
// Saturating.
static AS_ALWAYS_INLINE VecI DotBytePairs(VecI u, VecI s) { return _mm256_maddubs_epi16(u, s); }
#if defined(AS_KERNELS_NATIVE_VNNI)
static AS_ALWAYS_INLINE VecI AddDotPairs16(VecI acc, VecI a, VecI b) {
  return _mm256_dpwssd_avx_epi32(acc, a, b);
}
// Adds, per lane, the products of its four bytes: unsigned ones of u, signed ones of s.
static AS_ALWAYS_INLINE VecI AddDotBytes(VecI acc, VecI u, VecI s) {
#if defined(__AVXVNNI__)  // not where it is emulated
  // As an intrinsic, GCC moves the sums from one register to another and back around each. The
  // prefix keeps the assembler from AVX-512's form.
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(u), "x"(s));
  return acc;
#else
  return _mm256_dpbusd_epi32(acc, u, s);
#endif
}
#endif
static AS_ALWAYS_INLINE VecI SubPairs16(VecI a, VecI b) { return _mm256_sub_epi16(a, b); }
static AS_ALWAYS_INLINE VecI AddPairs16(VecI a, VecI b) { return _mm256_add_epi16(a, b); }
template <int N>
static AS_ALWAYS_INLINE VecI ShiftRightSignedPairs16(VecI x) {
  return _mm256_srai_epi16(x, N);
}
// All ones in each 16-bit half that is zero.
static AS_ALWAYS_INLINE VecI ZeroPairs16(VecI x) {
  return _mm256_cmpeq_epi16(x, _mm256_setzero_si256());
}
static AS_ALWAYS_INLINE bool AnyZeroPairs16(VecI x) {
  return _mm256_movemask_epi8(ZeroPairs16(x)) != 0;
}
// 16 bytes as a table, and for each byte of `at` the table's; 0 where it is 128 or more. Others are
// below 16.
static AS_ALWAYS_INLINE VecI LoadTable(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static AS_ALWAYS_INLINE VecI LookUp(VecI table, VecI at) { return _mm256_shuffle_epi8(table, at); }
static AS_ALWAYS_INLINE int32_t ReduceAddInt(VecI x) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
// 2^n for -127 < n < 128.
static AS_ALWAYS_INLINE VecF PowerOf2(VecI n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// x rounded to the nearest whole number, ties to even.
static AS_ALWAYS_INLINE VecF RoundToWhole(VecF x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n, rounded once, for whole n from -250 to 250. In two steps: 2^n may be out of range where
// the product is not.
static AS_ALWAYS_INLINE VecF ScaleByPowerOf2(VecF x, VecF n) {
  const VecI whole = RoundToInt(n), half = _mm256_srai_epi32(whole, 1);
  return Mul(Mul(x, PowerOf2(half)), PowerOf2(SubInt(whole, half)));
}

static AS_ALWAYS_INLINE VecI LoadI(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
static AS_ALWAYS_INLINE VecI MaskLoadI(Mask m, const void* p) {
  return _mm256_maskload_epi32(static_cast<const int*>(p), m);
}
static AS_ALWAYS_INLINE void StoreI(void* p, VecI x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), x);
}
static AS_ALWAYS_INLINE void MaskStoreI(Mask m, void* p, VecI x) {
  _mm256_maskstore_epi32(static_cast<int*>(p), m, x);
}
static AS_ALWAYS_INLINE VecF AsFloat(VecI x) { return _mm256_castsi256_ps(x); }
static AS_ALWAYS_INLINE VecI AsInt(VecF x) { return _mm256_castps_si256(x); }
// One byte per lane.
static AS_ALWAYS_INLINE VecI LoadBytes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
// Two signed bytes per lane, widened to its halves.
static AS_ALWAYS_INLINE VecI LoadBytePairs(const void* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
// Saturating.
static AS_ALWAYS_INLINE void StoreInt16(int16_t* p, VecI x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x, x), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(words));
}
static AS_ALWAYS_INLINE void StoreInt8(int8_t* p, VecI x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x, x), 0x08);
  const __m128i half = _mm256_castsi256_si128(words);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(half, half));
}

// The earlier and the later bfloat16 of every pair.
static AS_ALWAYS_INLINE VecF PairLow(VecI x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
static AS_ALWAYS_INLINE VecF PairHigh(VecI x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536)));
}
// The same of a pair of float16. bytes: where those of four lanes lie in 16.
static AS_ALWAYS_INLINE VecF WidenHalves(VecI x, __m128i bytes) {
  const __m256i fours = _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(bytes));
  return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(fours, 0x08)));
}
static AS_ALWAYS_INLINE VecF HalfLow(VecI x) {
  return WidenHalves(x, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 0, 1, 4, 5, 8, 9, 12, 13));
}
static AS_ALWAYS_INLINE VecF HalfHigh(VecI x) {
  return WidenHalves(x, _mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, 2, 3, 6, 7, 10, 11, 14, 15));
}
// As ToBFloat16. The result is in the lower half of each lane; the upper half is zero.
static AS_ALWAYS_INLINE VecI RoundBf16(VecF x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i top = _mm256_srli_epi32(u, 16);
  const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), quiet, nan);
}
static AS_ALWAYS_INLINE VecI PackPairs(VecF low, VecF high) {
  return _mm256_or_si256(RoundBf16(low), _mm256_slli_epi32(RoundBf16(high), 16));
}
static AS_ALWAYS_INLINE VecF LoadBf16(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
// From float16.
static AS_ALWAYS_INLINE VecF LoadHalf(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static AS_ALWAYS_INLINE void StoreBf16(uint16_t* p, VecF x) {
  const __m256i r = RoundBf16(x);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

// From [x0 y0 x1 y1 ..] in two vectors to [x0 x1 ..] and [y0 y1 ..], and back.
static AS_ALWAYS_INLINE void Deinterleave(VecF first, VecF second, VecF* x, VecF* y) {
  const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(first, second, 0x88));
  const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(first, second, 0xdd));
  *x = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
  *y = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
}
static AS_ALWAYS_INLINE void Interleave(VecF x, VecF y, VecF* first, VecF* second) {
  const __m256 low = _mm256_unpacklo_ps(x, y);
  const __m256 high = _mm256_unpackhi_ps(x, y);
  *first = _mm256_permute2f128_ps(low, high, 0x20);
  *second = _mm256_permute2f128_ps(low, high, 0x31);
}

}  // namespace
}  // namespace allspark::kernels
