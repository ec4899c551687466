// AVX-512 intrinsics on AVX2, FMA and F16C: those that the kernels use most, by the compiler's
// vector operators and by instructions on halves, because SIMDe's forms of them take the compiler
// minutes; and those that SIMDe 0.7.4 lacks. Only for emulated_intrinsics.h, after SIMDe with its
// native aliases.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// These are small; kernels' own functions, which are not, are inlined where the compiler likes.
#define AS_WIDE_INLINE static inline __attribute__((always_inline))

namespace allspark::testing::wide {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef int16_t Words __attribute__((vector_size(64)));
typedef uint16_t WordBits __attribute__((vector_size(64)));

template <class To, class From>
AS_WIDE_INLINE To As(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Half 0 or 1 of x, in the lowest bytes of a Part.
template <class Part, class From>
AS_WIDE_INLINE Part HalfOf(const From& x, int half) {
  static_assert(sizeof(Part) >= sizeof(From) / 2);
  Part part = {};
  std::memcpy(&part, reinterpret_cast<const char*>(&x) + sizeof(From) / 2 * half, sizeof(From) / 2);
  return part;
}

template <class To, class Half>
AS_WIDE_INLINE To Join(const Half& low, const Half& high) {
  static_assert(sizeof(To) == 2 * sizeof(Half));
  To to;
  std::memcpy(&to, &low, sizeof(low));
  std::memcpy(reinterpret_cast<char*>(&to) + sizeof(low), &high, sizeof(high));
  return to;
}

template <class To>
AS_WIDE_INLINE To Load(const void* p) {
  To to;
  std::memcpy(&to, p, sizeof(to));
  return to;
}
template <class From>
AS_WIDE_INLINE void Store(void* p, const From& x) {
  std::memcpy(p, &x, sizeof(x));
}

// op(halves of each x as Part) for both halves.
template <class To, class Part, class Op, class... From>
AS_WIDE_INLINE To InHalves(Op op, const From&... x) {
  return Join<To>(op(HalfOf<Part>(x, 0)...), op(HalfOf<Part>(x, 1)...));
}

template <class To, class Lanes, class Op>
AS_WIDE_INLINE To OfLanes(Op op, const To& x, const To& y) {
  return As<To>(op(As<Lanes>(x), As<Lanes>(y)));
}
template <class Lanes, class Op>
AS_WIDE_INLINE __m512i Shift(Op op, const __m512i& x, int n) {
  return As<__m512i>(op(As<Lanes>(x), n));
}

// The sums of four products of unsigned and signed bytes, exactly.
static inline __m256i DotBytes(__m256i sum, __m256i u, __m256i s) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
static inline __m256i DotWords(__m256i sum, __m256i x, __m256i y) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(x, y));
}

// As the instruction is described: two fused additions, first of the odd products.
static inline __m256 DotBf16(__m256i to, __m256i x, __m256i y) {
  __m256 sum = _mm256_castsi256_ps(to);
  const __m256i high = _mm256_set1_epi32(-65536);
  sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x, high)),
                        _mm256_castsi256_ps(_mm256_and_si256(y, high)), sum);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
                         _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)), sum);
}

struct Lanes32 {
  uint32_t lane[16];
};
struct Lanes16 {
  uint16_t lane[16];
};

// Lanes outside the mask are not read, and are zero.
static inline Lanes32 MaskLoad(__mmask16 m, const void* p) {
  Lanes32 x = {};
  for (int i = 0; i < 16; ++i) {
    if ((m >> i) & 1) std::memcpy(&x.lane[i], static_cast<const char*>(p) + 4 * i, 4);
  }
  return x;
}
static inline void MaskStore(void* p, __mmask16 m, const Lanes32& x) {
  for (int i = 0; i < 16; ++i) {
    if ((m >> i) & 1) std::memcpy(static_cast<char*>(p) + 4 * i, &x.lane[i], 4);
  }
}
struct Lanes8 {
  uint8_t lane[16];
};
// Signed, to the nearest that fits.
static inline Lanes8 NarrowToInt8(const Lanes32& x) {
  Lanes8 y;
  for (int i = 0; i < 16; ++i) {
    const int32_t lane = static_cast<int32_t>(x.lane[i]);
    y.lane[i] = static_cast<uint8_t>(lane < -128 ? -128 : lane > 127 ? 127 : lane);
  }
  return y;
}
static inline Lanes16 Narrow(const Lanes32& x) {
  Lanes16 y;
  for (int i = 0; i < 16; ++i) y.lane[i] = static_cast<uint16_t>(x.lane[i]);
  return y;
}
// a * 2^floor(b). In double the product is exact, or far too large or small for a float.
static inline Lanes32 ScaleBy(Lanes32 a, const Lanes32& b) {
  for (int i = 0; i < 16; ++i) {
    const float floor = std::floor(As<float>(b.lane[i]));
    const float n = floor > 300.0f ? 300.0f : floor < -300.0f ? -300.0f : floor;
    const auto power = As<double>(static_cast<uint64_t>(1023 + static_cast<int64_t>(n)) << 52);
    a.lane[i] = As<uint32_t>(static_cast<float>(double{As<float>(a.lane[i])} * power));
  }
  return a;
}
// x - floor(x); 0 for infinities.
static inline Lanes32 Fraction(Lanes32 x) {
  for (uint32_t& lane : x.lane) {
    const float f = As<float>(lane);
    lane = As<uint32_t>(std::isinf(f) ? 0.0f : f - std::floor(f));
  }
  return x;
}
// Subnormal numbers become zero.
static inline Lanes16 NarrowBf16(const Lanes32& x) {
  Lanes16 y;
  for (int i = 0; i < 16; ++i) {
    const uint32_t tiny = (x.lane[i] & 0x7f800000u) == 0 ? 0x80000000u : 0xffffffffu;
    y.lane[i] = ToBFloat16(As<float>(x.lane[i] & tiny)).bits;
  }
  return y;
}
struct Words32 {
  uint16_t word[32];
};
static inline Words32 NarrowTwoBf16(const Lanes16& high, const Lanes16& low) {
  Words32 y;
  for (int i = 0; i < 16; ++i) y.word[i] = low.lane[i], y.word[16 + i] = high.lane[i];
  return y;
}
static inline Words32 PermuteWords(const Words32& index, const Words32& x) {
  Words32 y;
  for (int i = 0; i < 32; ++i) y.word[i] = x.word[index.word[i] & 31];
  return y;
}
static inline uint32_t ZeroWords(const Words32& x, const Words32& y) {
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= uint32_t{(x.word[i] & y.word[i]) == 0} << i;
  return mask;
}

}  // namespace allspark::testing::wide

#define AS_WIDE allspark::testing::wide
// To: the result's type; Part: that of a half of each argument; op: a function of AVX2.
#define AS_IN_HALVES(To, Part, op, ...) \
  AS_WIDE::InHalves<To, Part>([](auto... parts) { return op(parts...); }, __VA_ARGS__)
// A vector operator between two vectors as Lanes.
#define AS_OPERATOR(To, Lanes, op, ...)                                                     \
  AS_WIDE::OfLanes<To, AS_WIDE::Lanes>([](auto left, auto right) { return left op right; }, \
                                       __VA_ARGS__)
// A shift of a vector as Lanes by a number of bits.
#define AS_SHIFT(Lanes, op, ...) \
  AS_WIDE::Shift<AS_WIDE::Lanes>([](auto lanes, int bits) { return lanes op bits; }, __VA_ARGS__)
#define AS_LANES(...) AS_WIDE::As<AS_WIDE::Lanes32>(__VA_ARGS__)

#undef _mm512_setzero_ps
#undef _mm512_set1_ps
#undef _mm512_set1_epi32
#undef _mm512_loadu_ps
#undef _mm512_loadu_si512
#undef _mm512_storeu_ps
#undef _mm512_storeu_si512
#undef _mm512_castps_si512
#undef _mm512_castsi512_ps
#undef _mm512_extractf32x8_ps
#define _mm512_setzero_ps() (__m512{})
#define _mm512_set1_ps(x) AS_WIDE::Join<__m512>(_mm256_set1_ps(x), _mm256_set1_ps(x))
#define _mm512_set1_epi32(x) AS_WIDE::Join<__m512i>(_mm256_set1_epi32(x), _mm256_set1_epi32(x))
#define _mm512_loadu_ps(p) AS_WIDE::Load<__m512>(p)
#define _mm512_loadu_si512(p) AS_WIDE::Load<__m512i>(p)
#define _mm512_storeu_ps(p, x) AS_WIDE::Store(p, x)
#define _mm512_storeu_si512(p, x) AS_WIDE::Store(p, x)
#define _mm512_castps_si512(x) AS_WIDE::As<__m512i>(x)
#define _mm512_castsi512_ps(x) AS_WIDE::As<__m512>(x)
#define _mm512_extractf32x8_ps(x, half) AS_WIDE::HalfOf<__m256>(x, half)

#undef _mm512_add_ps
#undef _mm512_sub_ps
#undef _mm512_mul_ps
#undef _mm512_div_ps
#undef _mm512_add_epi32
#undef _mm512_sub_epi32
#undef _mm512_mullo_epi32
#undef _mm512_add_epi16
#undef _mm512_sub_epi16
#undef _mm512_and_si512
#undef _mm512_or_si512
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_srai_epi32
#undef _mm512_slli_epi16
#undef _mm512_srli_epi16
#undef _mm512_srai_epi16
#define _mm512_add_ps(x, y) AS_OPERATOR(__m512, Floats, +, x, y)
#define _mm512_sub_ps(x, y) AS_OPERATOR(__m512, Floats, -, x, y)
#define _mm512_mul_ps(x, y) AS_OPERATOR(__m512, Floats, *, x, y)
#define _mm512_div_ps(x, y) AS_OPERATOR(__m512, Floats, /, x, y)
#define _mm512_add_epi32(x, y) AS_OPERATOR(__m512i, Bits, +, x, y)
#define _mm512_sub_epi32(x, y) AS_OPERATOR(__m512i, Bits, -, x, y)
#define _mm512_mullo_epi32(x, y) AS_OPERATOR(__m512i, Bits, *, x, y)
#define _mm512_add_epi16(x, y) AS_OPERATOR(__m512i, WordBits, +, x, y)
#define _mm512_sub_epi16(x, y) AS_OPERATOR(__m512i, WordBits, -, x, y)
#define _mm512_and_si512(x, y) AS_OPERATOR(__m512i, Bits, &, x, y)
#define _mm512_or_si512(x, y) AS_OPERATOR(__m512i, Bits, |, x, y)
#define _mm512_slli_epi32(x, n) AS_SHIFT(Bits, <<, x, n)
#define _mm512_srli_epi32(x, n) AS_SHIFT(Bits, >>, x, n)
#define _mm512_srai_epi32(x, n) AS_SHIFT(Ints, >>, x, n)
#define _mm512_slli_epi16(x, n) AS_SHIFT(WordBits, <<, x, n)
#define _mm512_srli_epi16(x, n) AS_SHIFT(WordBits, >>, x, n)
#define _mm512_srai_epi16(x, n) AS_SHIFT(Words, >>, x, n)

#undef _mm512_fmadd_ps
#undef _mm512_min_ps
#undef _mm512_max_ps
#undef _mm512_dpbusd_epi32
#undef _mm512_dpwssd_epi32
#undef _mm512_dpbf16_ps
#undef _mm512_madd_epi16
#undef _mm512_maddubs_epi16
#undef _mm512_shuffle_epi8
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtps_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepi8_epi16
#define _mm512_fmadd_ps(x, y, z) AS_IN_HALVES(__m512, __m256, _mm256_fmadd_ps, x, y, z)
#define _mm512_min_ps(x, y) AS_IN_HALVES(__m512, __m256, _mm256_min_ps, x, y)
#define _mm512_max_ps(x, y) AS_IN_HALVES(__m512, __m256, _mm256_max_ps, x, y)
#define _mm512_dpbusd_epi32(sum, x, y) AS_IN_HALVES(__m512i, __m256i, AS_WIDE::DotBytes, sum, x, y)
#define _mm512_dpwssd_epi32(sum, x, y) AS_IN_HALVES(__m512i, __m256i, AS_WIDE::DotWords, sum, x, y)
#define _mm512_dpbf16_ps(sum, x, y) AS_IN_HALVES(__m512, __m256i, AS_WIDE::DotBf16, sum, x, y)
#define _mm512_madd_epi16(x, y) AS_IN_HALVES(__m512i, __m256i, _mm256_madd_epi16, x, y)
#define _mm512_maddubs_epi16(x, y) AS_IN_HALVES(__m512i, __m256i, _mm256_maddubs_epi16, x, y)
#define _mm512_shuffle_epi8(x, at) AS_IN_HALVES(__m512i, __m256i, _mm256_shuffle_epi8, x, at)
#define _mm512_cvtepi32_ps(x) AS_IN_HALVES(__m512, __m256i, _mm256_cvtepi32_ps, x)
#define _mm512_cvtps_epi32(x) AS_IN_HALVES(__m512i, __m256, _mm256_cvtps_epi32, x)
#define _mm512_cvtph_ps(x) AS_IN_HALVES(__m512, __m128i, _mm256_cvtph_ps, x)
#define _mm512_cvtepu16_epi32(x) AS_IN_HALVES(__m512i, __m128i, _mm256_cvtepu16_epi32, x)
#define _mm512_cvtepu8_epi32(x) AS_IN_HALVES(__m512i, __m128i, _mm256_cvtepu8_epi32, x)
#define _mm512_cvtepi8_epi32(x) AS_IN_HALVES(__m512i, __m128i, _mm256_cvtepi8_epi32, x)
#define _mm512_cvtepi8_epi16(x) AS_IN_HALVES(__m512i, __m128i, _mm256_cvtepi8_epi16, x)

#undef _mm512_maskz_loadu_ps
#undef _mm512_maskz_loadu_epi32
#undef _mm512_mask_storeu_ps
#undef _mm512_mask_storeu_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtsepi32_epi8
#undef _mm512_scalef_ps
#undef _mm512_reduce_ps
#undef _mm512_cvtneps_pbh
#undef _mm512_cvtne2ps_pbh
#undef _mm512_permutexvar_epi16
#undef _mm512_testn_epi16_mask
#define _mm512_maskz_loadu_ps(m, p) AS_WIDE::As<__m512>(AS_WIDE::MaskLoad(m, p))
#define _mm512_maskz_loadu_epi32(m, p) AS_WIDE::As<__m512i>(AS_WIDE::MaskLoad(m, p))
#define _mm512_mask_storeu_ps(p, m, x) AS_WIDE::MaskStore(p, m, AS_LANES(x))
#define _mm512_mask_storeu_epi32(p, m, x) AS_WIDE::MaskStore(p, m, AS_LANES(x))
#define _mm512_cvtepi32_epi16(x) AS_WIDE::As<__m256i>(AS_WIDE::Narrow(AS_LANES(x)))
#define _mm512_cvtsepi32_epi8(x) AS_WIDE::As<__m128i>(AS_WIDE::NarrowToInt8(AS_LANES(x)))
#define _mm512_scalef_ps(x, y) AS_WIDE::As<__m512>(AS_WIDE::ScaleBy(AS_LANES(x), AS_LANES(y)))
#define _mm512_reduce_ps(x, mode) AS_WIDE::As<__m512>(AS_WIDE::Fraction(AS_LANES(x)))
#define _mm512_cvtneps_pbh(x) AS_WIDE::As<__m256i>(AS_WIDE::NarrowBf16(AS_LANES(x)))
#define _mm512_cvtne2ps_pbh(x, y) \
  AS_WIDE::As<__m512i>(           \
      AS_WIDE::NarrowTwoBf16(AS_WIDE::NarrowBf16(AS_LANES(x)), AS_WIDE::NarrowBf16(AS_LANES(y))))
#define _mm512_permutexvar_epi16(index, x)                                         \
  AS_WIDE::As<__m512i>(AS_WIDE::PermuteWords(AS_WIDE::As<AS_WIDE::Words32>(index), \
                                             AS_WIDE::As<AS_WIDE::Words32>(x)))
#define _mm512_testn_epi16_mask(x, y) \
  AS_WIDE::ZeroWords(AS_WIDE::As<AS_WIDE::Words32>(x), AS_WIDE::As<AS_WIDE::Words32>(y))
