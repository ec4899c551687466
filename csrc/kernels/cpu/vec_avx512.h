// A vector of 16 float lanes on AVX-512 (F, BW, VL, DQ): the same operations as vec_avx2.h, which
// explains each name. With BF16, also the dot product of pairs.
#pragma once

// GCC 12 warns about the deliberately undefined operands of its own AVX-512 intrinsics (GCC bug
// 105593), in every function that inlines them.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <cstdint>

#include "kernels/args.h"

namespace allspark::kernels {
namespace {

constexpr int kLanes = 16;
constexpr int kRegisters = 32;
// 24 accumulators of 32 registers; a whole panel of 64 columns per row.
constexpr int kTileRows = 6;
constexpr int TileVecs(int) { return 4; }

using VecF = __m512;
using VecI = __m512i;
using Mask = __mmask16;

static AS_ALWAYS_INLINE VecF Zero() { return _mm512_setzero_ps(); }
static AS_ALWAYS_INLINE VecF Set1(float x) { return _mm512_set1_ps(x); }
static AS_ALWAYS_INLINE VecF LoadF(const float* p) { return _mm512_loadu_ps(p); }
static AS_ALWAYS_INLINE void StoreF(float* p, VecF x) { _mm512_storeu_ps(p, x); }

// The lowest n lanes: none for n < 0, all for n > 16.
static AS_ALWAYS_INLINE Mask FirstLanes(int64_t n) {
  return static_cast<Mask>(n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u);
}
static AS_ALWAYS_INLINE Mask RangeMask(int64_t first, int64_t begin, int64_t end) {
  const unsigned to = FirstLanes(end - first);
  const unsigned before = FirstLanes(begin - first);
  return static_cast<Mask>(to & ~before);
}
static AS_ALWAYS_INLINE VecF MaskLoadF(Mask m, const float* p) {
  return _mm512_maskz_loadu_ps(m, p);
}
static AS_ALWAYS_INLINE void MaskStoreF(Mask m, float* p, VecF x) {
  _mm512_mask_storeu_ps(p, m, x);
}

static AS_ALWAYS_INLINE VecF Fma(VecF a, VecF b, VecF c) { return _mm512_fmadd_ps(a, b, c); }
static AS_ALWAYS_INLINE VecF Add(VecF a, VecF b) { return _mm512_add_ps(a, b); }
static AS_ALWAYS_INLINE VecF Sub(VecF a, VecF b) { return _mm512_sub_ps(a, b); }
static AS_ALWAYS_INLINE VecF Mul(VecF a, VecF b) { return _mm512_mul_ps(a, b); }
static AS_ALWAYS_INLINE VecF Div(VecF a, VecF b) { return _mm512_div_ps(a, b); }
static AS_ALWAYS_INLINE VecF Sqrt(VecF a) { return _mm512_sqrt_ps(a); }
static AS_ALWAYS_INLINE VecF Max(VecF a, VecF b) { return _mm512_max_ps(a, b); }
static AS_ALWAYS_INLINE VecF Min(VecF a, VecF b) { return _mm512_min_ps(a, b); }
static AS_ALWAYS_INLINE VecF Neg(VecF a) { return _mm512_xor_ps(a, Set1(-0.0f)); }
static AS_ALWAYS_INLINE VecF Abs(VecF a) { return _mm512_andnot_ps(Set1(-0.0f), a); }
static AS_ALWAYS_INLINE Mask Less(VecF a, VecF b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static AS_ALWAYS_INLINE uint32_t EqualBits(VecF a, VecF b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
static AS_ALWAYS_INLINE VecF Select(Mask m, VecF yes, VecF no) {
  return _mm512_mask_blend_ps(m, no, yes);
}

static AS_ALWAYS_INLINE float ReduceAdd(VecF x) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
static AS_ALWAYS_INLINE float ReduceMax(VecF x) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
static AS_ALWAYS_INLINE float FirstLane(VecF x) { return _mm_cvtss_f32(_mm512_castps512_ps128(x)); }

static AS_ALWAYS_INLINE VecI RoundToInt(VecF x) { return _mm512_cvtps_epi32(x); }
static AS_ALWAYS_INLINE VecF IntToFloat(VecI x) { return _mm512_cvtepi32_ps(x); }
static AS_ALWAYS_INLINE VecI SubInt(VecI a, VecI b) { return _mm512_sub_epi32(a, b); }
static AS_ALWAYS_INLINE VecI AddInt(VecI a, VecI b) { return _mm512_add_epi32(a, b); }
static AS_ALWAYS_INLINE VecI MulInt(VecI a, VecI b) { return _mm512_mullo_epi32(a, b); }
static AS_ALWAYS_INLINE VecI And(VecI a, VecI b) { return _mm512_and_si512(a, b); }
static AS_ALWAYS_INLINE VecI Or(VecI a, VecI b) { return _mm512_or_si512(a, b); }
static AS_ALWAYS_INLINE VecI AndNot(VecI a, VecI b) { return _mm512_andnot_si512(a, b); }
static AS_ALWAYS_INLINE VecI Set1Int(int32_t x) { return _mm512_set1_epi32(x); }
template <int N>
static AS_ALWAYS_INLINE VecI ShiftRight(VecI x) {
  return _mm512_srli_epi32(x, N);
}
template <int N>
static AS_ALWAYS_INLINE VecI ShiftRightSigned(VecI x) {
  return _mm512_srai_epi32(x, N);
}
template <int N>
static AS_ALWAYS_INLINE VecI ShiftLeft(VecI x) {
  return _mm512_slli_epi32(x, N);
}
static AS_ALWAYS_INLINE VecI ShiftLeft16(VecI x) { return _mm512_slli_epi16(x, 8); }
static AS_ALWAYS_INLINE VecI ShiftRight16(VecI x) { return _mm512_srli_epi16(x, 8); }
static AS_ALWAYS_INLINE VecI ShiftRightSigned16(VecI x) { return _mm512_srai_epi16(x, 8); }
static AS_ALWAYS_INLINE VecI DotPairs16(VecI a, VecI b) { return _mm512_madd_epi16(a, b); }
static AS_ALWAYS_INLINE void AddTo(VecI& sum, VecI x) { sum = _mm512_add_epi32(sum, x); }
static AS_ALWAYS_INLINE void AddToPairs16(VecI& sum, VecI x) { sum = _mm512_add_epi16(sum, x); }
static AS_ALWAYS_INLINE VecI DotBytePairs(VecI u, VecI s) { return _mm512_maddubs_epi16(u, s); }
#if defined(AS_KERNELS_NATIVE_VNNI)
static AS_ALWAYS_INLINE VecI AddDotPairs16(VecI acc, VecI a, VecI b) {
  return _mm512_dpwssd_epi32(acc, a, b);
}
static AS_ALWAYS_INLINE VecI AddDotBytes(VecI acc, VecI u, VecI s) {
#if defined(__AVX512VNNI__)  // not where it is emulated
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s));
  return acc;
#else
  return _mm512_dpbusd_epi32(acc, u, s);
#endif
}
#endif
static AS_ALWAYS_INLINE VecI SubPairs16(VecI a, VecI b) { return _mm512_sub_epi16(a, b); }
static AS_ALWAYS_INLINE VecI AddPairs16(VecI a, VecI b) { return _mm512_add_epi16(a, b); }
template <int N>
static AS_ALWAYS_INLINE VecI ShiftRightSignedPairs16(VecI x) {
  return _mm512_srai_epi16(x, N);
}
static AS_ALWAYS_INLINE VecI ZeroPairs16(VecI x) {
  return _mm512_movm_epi16(_mm512_testn_epi16_mask(x, x));
}
static AS_ALWAYS_INLINE bool AnyZeroPairs16(VecI x) { return _mm512_testn_epi16_mask(x, x) != 0; }
static AS_ALWAYS_INLINE VecI LoadTable(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static AS_ALWAYS_INLINE VecI LookUp(VecI table, VecI at) { return _mm512_shuffle_epi8(table, at); }
// For each 16 bits of `at` the element of a table of 32 whose number is their lower five bits.
#define AS_VEC_LOOKS_UP_PAIRS16 1
static AS_ALWAYS_INLINE VecI LookUpPairs16(VecI table, VecI at) {
  return _mm512_permutexvar_epi16(at, table);
}
// For each lane the element of a table of 16 whose number is the lane's lower four bits.
#define AS_VEC_LOOKS_UP_FLOATS 1
static AS_ALWAYS_INLINE VecF LookUpFloats(VecF table, VecI at) {
  return _mm512_permutexvar_ps(at, table);
}
static AS_ALWAYS_INLINE int32_t ReduceAddInt(VecI x) {
  const __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
static AS_ALWAYS_INLINE VecF RoundToWhole(VecF x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// A fractional n is rounded down; minus infinity gives 0.
static AS_ALWAYS_INLINE VecF ScaleByPowerOf2(VecF x, VecF n) { return _mm512_scalef_ps(x, n); }

static AS_ALWAYS_INLINE VecI LoadI(const void* p) { return _mm512_loadu_si512(p); }
static AS_ALWAYS_INLINE VecI MaskLoadI(Mask m, const void* p) {
  return _mm512_maskz_loadu_epi32(m, p);
}
static AS_ALWAYS_INLINE void StoreI(void* p, VecI x) { _mm512_storeu_si512(p, x); }
static AS_ALWAYS_INLINE void MaskStoreI(Mask m, void* p, VecI x) {
  _mm512_mask_storeu_epi32(p, m, x);
}
static AS_ALWAYS_INLINE VecF AsFloat(VecI x) { return _mm512_castsi512_ps(x); }
static AS_ALWAYS_INLINE VecI AsInt(VecF x) { return _mm512_castps_si512(x); }
static AS_ALWAYS_INLINE VecI LoadBytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static AS_ALWAYS_INLINE VecI LoadBytePairs(const void* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
static AS_ALWAYS_INLINE void StoreInt16(int16_t* p, VecI x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(x));
}
static AS_ALWAYS_INLINE void StoreInt8(int8_t* p, VecI x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
}

static AS_ALWAYS_INLINE VecF PairLow(VecI x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}
static AS_ALWAYS_INLINE VecF PairHigh(VecI x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536)));
}
// words: the 16 to widen come first.
static AS_ALWAYS_INLINE VecF WidenHalves(VecI x, VecI words) {
  return _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(words, x)));
}
static AS_ALWAYS_INLINE VecI EvenWords() {
  return _mm512_setr_epi32(0x20000, 0x60004, 0xa0008, 0xe000c, 0x120010, 0x160014, 0x1a0018,
                           0x1e001c, 0, 0, 0, 0, 0, 0, 0, 0);
}
static AS_ALWAYS_INLINE VecF HalfLow(VecI x) { return WidenHalves(x, EvenWords()); }
static AS_ALWAYS_INLINE VecF HalfHigh(VecI x) {
  return WidenHalves(x, _mm512_add_epi32(EvenWords(), _mm512_set1_epi32(0x10001)));
}
// The conversion instruction is not used, since it flushes subnormals: all ISAs round alike.
static AS_ALWAYS_INLINE VecI RoundBf16(VecF x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i top = _mm512_srli_epi32(u, 16);
  const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
  return _mm512_mask_blend_epi32(nan, _mm512_srli_epi32(up, 16), quiet);
}
static AS_ALWAYS_INLINE VecI PackPairs(VecF low, VecF high) {
  return _mm512_or_si512(RoundBf16(low), _mm512_slli_epi32(RoundBf16(high), 16));
}
static AS_ALWAYS_INLINE VecF LoadBf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
static AS_ALWAYS_INLINE VecF LoadHalf(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static AS_ALWAYS_INLINE void StoreBf16(uint16_t* p, VecF x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(RoundBf16(x)));
}

static AS_ALWAYS_INLINE void Deinterleave(VecF first, VecF second, VecF* x, VecF* y) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  *x = _mm512_permutex2var_ps(first, even, second);
  *y = _mm512_permutex2var_ps(first, odd, second);
}
static AS_ALWAYS_INLINE void Interleave(VecF x, VecF y, VecF* first, VecF* second) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  *first = _mm512_permutex2var_ps(x, low, y);
  *second = _mm512_permutex2var_ps(x, high, y);
}

// x - floor(x); 0 for minus infinity.
#define AS_VEC_HAS_FRACTION 1
static AS_ALWAYS_INLINE VecF Fraction(VecF x) {
  return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

#if defined(AS_KERNELS_NATIVE_BF16)
// acc + the products of the pairs, with at most two roundings; subnormals count as zero.
static AS_ALWAYS_INLINE VecF DotBf16(VecF acc, VecI a, VecI b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
// As StoreBf16, but uses the conversion instruction, which flushes subnormals to zero.
static AS_ALWAYS_INLINE void StoreBf16Quickly(uint16_t* p, VecF x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
static AS_ALWAYS_INLINE void StoreBf16Quickly(uint16_t* p, VecF first, VecF second) {
  StoreI(p, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}
#endif

}  // namespace
}  // namespace allspark::kernels
