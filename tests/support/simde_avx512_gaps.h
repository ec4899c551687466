// AVX-512 intrinsics that the kernels use and SIMDe 0.7.4 lacks, lane by lane. Only for
// emulated_intrinsics.h, after SIMDe with its native aliases.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace allspark::testing::gaps {

template <class To, class From>
static AS_ALWAYS_INLINE To Bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct Lanes32 {
  uint32_t lane[16];
};
struct Lanes16 {
  uint16_t lane[16];
};

// Lanes outside the mask are not read, and are zero.
static AS_ALWAYS_INLINE Lanes32 MaskLoad(__mmask16 m, const void* p) {
  Lanes32 x = {};
  for (int i = 0; i < 16; ++i) {
    if ((m >> i) & 1) std::memcpy(&x.lane[i], static_cast<const char*>(p) + 4 * i, 4);
  }
  return x;
}
static AS_ALWAYS_INLINE void MaskStore(void* p, __mmask16 m, const Lanes32& x) {
  for (int i = 0; i < 16; ++i) {
    if ((m >> i) & 1) std::memcpy(static_cast<char*>(p) + 4 * i, &x.lane[i], 4);
  }
}
static AS_ALWAYS_INLINE Lanes32 ShiftRightSigned(Lanes32 x, unsigned n) {
  for (uint32_t& lane : x.lane) lane = static_cast<uint32_t>(static_cast<int32_t>(lane) >> n);
  return x;
}
static AS_ALWAYS_INLINE Lanes32 IntToFloat(Lanes32 x) {
  for (uint32_t& lane : x.lane)
    lane = Bits<uint32_t>(static_cast<float>(static_cast<int32_t>(lane)));
  return x;
}
// To nearest, ties to even; a value that does not fit becomes the lowest integer.
static AS_ALWAYS_INLINE Lanes32 FloatToInt(Lanes32 x) {
  for (uint32_t& lane : x.lane) {
    const float f = std::nearbyintf(Bits<float>(lane));
    lane = f >= -2147483648.0f && f < 2147483648.0f ? static_cast<uint32_t>(static_cast<int32_t>(f))
                                                    : 0x80000000u;
  }
  return x;
}
// The dot product of each lane's signed 16-bit halves.
static AS_ALWAYS_INLINE Lanes32 DotPairs16(Lanes32 x, const Lanes32& y) {
  const auto low = [](uint32_t lane) { return static_cast<int32_t>(static_cast<int16_t>(lane)); };
  const auto high = [](uint32_t lane) { return static_cast<int32_t>(lane) >> 16; };
  for (int i = 0; i < 16; ++i) {
    x.lane[i] = static_cast<uint32_t>(low(x.lane[i]) * low(y.lane[i])) +
                static_cast<uint32_t>(high(x.lane[i]) * high(y.lane[i]));
  }
  return x;
}
static AS_ALWAYS_INLINE Lanes32 Widen(const Lanes16& x) {
  Lanes32 y;
  for (int i = 0; i < 16; ++i) y.lane[i] = x.lane[i];
  return y;
}
struct Lanes8 {
  uint8_t lane[16];
};
static AS_ALWAYS_INLINE Lanes32 Widen(const Lanes8& x) {
  Lanes32 y;
  for (int i = 0; i < 16; ++i) y.lane[i] = x.lane[i];
  return y;
}
// Signed, to the nearest that fits.
static AS_ALWAYS_INLINE Lanes8 NarrowToInt8(const Lanes32& x) {
  Lanes8 y;
  for (int i = 0; i < 16; ++i) {
    const int32_t lane = static_cast<int32_t>(x.lane[i]);
    y.lane[i] = static_cast<uint8_t>(lane < -128 ? -128 : lane > 127 ? 127 : lane);
  }
  return y;
}
static AS_ALWAYS_INLINE Lanes16 Narrow(const Lanes32& x) {
  Lanes16 y;
  for (int i = 0; i < 16; ++i) y.lane[i] = static_cast<uint16_t>(x.lane[i]);
  return y;
}
// a * 2^floor(b).
static AS_ALWAYS_INLINE Lanes32 ScaleBy(Lanes32 a, const Lanes32& b) {
  for (int i = 0; i < 16; ++i) {
    const float n = std::fmin(std::fmax(std::floor(Bits<float>(b.lane[i])), -1000.0f), 1000.0f);
    a.lane[i] = Bits<uint32_t>(std::scalbn(Bits<float>(a.lane[i]), static_cast<int>(n)));
  }
  return a;
}
// x - floor(x); 0 for infinities.
static AS_ALWAYS_INLINE Lanes32 Fraction(Lanes32 x) {
  for (uint32_t& lane : x.lane) {
    const float f = Bits<float>(lane);
    lane = Bits<uint32_t>(std::isinf(f) ? 0.0f : f - std::floor(f));
  }
  return x;
}
// Subnormal numbers become zero.
static AS_ALWAYS_INLINE Lanes16 NarrowBf16(const Lanes32& x) {
  Lanes16 y;
  for (int i = 0; i < 16; ++i) {
    const uint32_t tiny = (x.lane[i] & 0x7f800000u) == 0 ? 0x80000000u : 0xffffffffu;
    y.lane[i] = ToBFloat16(Bits<float>(x.lane[i] & tiny)).bits;
  }
  return y;
}
struct Words32 {
  uint16_t word[32];
};
static AS_ALWAYS_INLINE Words32 NarrowTwoBf16(const Lanes16& high, const Lanes16& low) {
  Words32 y;
  for (int i = 0; i < 16; ++i) y.word[i] = low.lane[i], y.word[16 + i] = high.lane[i];
  return y;
}
static AS_ALWAYS_INLINE Words32 PermuteWords(const Words32& index, const Words32& x) {
  Words32 y;
  for (int i = 0; i < 32; ++i) y.word[i] = x.word[index.word[i] & 31];
  return y;
}
struct SignedBytes16 {
  int8_t byte[16];
};
static AS_ALWAYS_INLINE Lanes32 WidenSigned(const SignedBytes16& x) {
  Lanes32 y;
  for (int i = 0; i < 16; ++i) y.lane[i] = static_cast<uint32_t>(static_cast<int32_t>(x.byte[i]));
  return y;
}
static AS_ALWAYS_INLINE uint32_t ZeroWords(const Words32& x, const Words32& y) {
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= uint32_t{(x.word[i] & y.word[i]) == 0} << i;
  return mask;
}
static AS_ALWAYS_INLINE Lanes32 WidenHalf(const Lanes16& x) {
  Lanes32 y;
  for (int i = 0; i < 16; ++i) y.lane[i] = Bits<uint32_t>(ToFloat(Float16{x.lane[i]}));
  return y;
}
static AS_ALWAYS_INLINE __m256 Half(__m512 x, int half) {
  __m256 y;
  std::memcpy(&y, reinterpret_cast<const char*>(&x) + 32 * half, 32);
  return y;
}

}  // namespace allspark::testing::gaps

// Some compilers have macros of these names.
#undef _mm512_maskz_loadu_ps
#undef _mm512_maskz_loadu_epi32
#undef _mm512_mask_storeu_ps
#undef _mm512_mask_storeu_epi32
#undef _mm512_srai_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtps_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_extractf32x8_ps
#undef _mm512_madd_epi16
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtsepi32_epi8
#undef _mm512_scalef_ps
#undef _mm512_reduce_ps
#undef _mm512_cvtneps_pbh
#undef _mm512_cvtne2ps_pbh
#undef _mm512_permutexvar_epi16
#undef _mm512_cvtepi8_epi32
#undef _mm512_testn_epi16_mask
#undef _mm512_cvtph_ps
#define AS_GAPS allspark::testing::gaps
#define AS_GAPS_IN(x) AS_GAPS::Bits<AS_GAPS::Lanes32>(x)
#define _mm512_maskz_loadu_ps(m, p) AS_GAPS::Bits<__m512>(AS_GAPS::MaskLoad(m, p))
#define _mm512_maskz_loadu_epi32(m, p) AS_GAPS::Bits<__m512i>(AS_GAPS::MaskLoad(m, p))
#define _mm512_mask_storeu_ps(p, m, x) AS_GAPS::MaskStore(p, m, AS_GAPS_IN(x))
#define _mm512_mask_storeu_epi32(p, m, x) AS_GAPS::MaskStore(p, m, AS_GAPS_IN(x))
#define _mm512_srai_epi32(x, n) AS_GAPS::Bits<__m512i>(AS_GAPS::ShiftRightSigned(AS_GAPS_IN(x), n))
#define _mm512_cvtepi32_ps(x) AS_GAPS::Bits<__m512>(AS_GAPS::IntToFloat(AS_GAPS_IN(x)))
#define _mm512_cvtps_epi32(x) AS_GAPS::Bits<__m512i>(AS_GAPS::FloatToInt(AS_GAPS_IN(x)))
#define _mm512_cvtepu16_epi32(x) \
  AS_GAPS::Bits<__m512i>(AS_GAPS::Widen(AS_GAPS::Bits<AS_GAPS::Lanes16>(x)))
#define _mm512_cvtepi32_epi16(x) AS_GAPS::Bits<__m256i>(AS_GAPS::Narrow(AS_GAPS_IN(x)))
#define _mm512_cvtepu8_epi32(x) \
  AS_GAPS::Bits<__m512i>(AS_GAPS::Widen(AS_GAPS::Bits<AS_GAPS::Lanes8>(x)))
#define _mm512_cvtsepi32_epi8(x) AS_GAPS::Bits<__m128i>(AS_GAPS::NarrowToInt8(AS_GAPS_IN(x)))
#define _mm512_madd_epi16(x, y) \
  AS_GAPS::Bits<__m512i>(AS_GAPS::DotPairs16(AS_GAPS_IN(x), AS_GAPS_IN(y)))
#define _mm512_extractf32x8_ps(x, half) AS_GAPS::Half(x, half)
#define _mm512_scalef_ps(a, b) AS_GAPS::Bits<__m512>(AS_GAPS::ScaleBy(AS_GAPS_IN(a), AS_GAPS_IN(b)))
#define _mm512_reduce_ps(x, mode) AS_GAPS::Bits<__m512>(AS_GAPS::Fraction(AS_GAPS_IN(x)))
#define _mm512_cvtneps_pbh(x) AS_GAPS::Bits<__m256i>(AS_GAPS::NarrowBf16(AS_GAPS_IN(x)))
#define _mm512_cvtne2ps_pbh(x, y)                                                   \
  AS_GAPS::Bits<__m512i>(AS_GAPS::NarrowTwoBf16(AS_GAPS::NarrowBf16(AS_GAPS_IN(x)), \
                                                AS_GAPS::NarrowBf16(AS_GAPS_IN(y))))
#define _mm512_permutexvar_epi16(index, x)                                             \
  AS_GAPS::Bits<__m512i>(AS_GAPS::PermuteWords(AS_GAPS::Bits<AS_GAPS::Words32>(index), \
                                               AS_GAPS::Bits<AS_GAPS::Words32>(x)))
#define _mm512_cvtepi8_epi32(x) \
  AS_GAPS::Bits<__m512i>(AS_GAPS::WidenSigned(AS_GAPS::Bits<AS_GAPS::SignedBytes16>(x)))
#define _mm512_testn_epi16_mask(x, y) \
  AS_GAPS::ZeroWords(AS_GAPS::Bits<AS_GAPS::Words32>(x), AS_GAPS::Bits<AS_GAPS::Words32>(y))
#define _mm512_cvtph_ps(x) \
  AS_GAPS::Bits<__m512>(AS_GAPS::WidenHalf(AS_GAPS::Bits<AS_GAPS::Lanes16>(x)))
