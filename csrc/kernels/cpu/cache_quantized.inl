// The quantised KV cache. Attention multiplies its integers, widened to 16 bits, by queries and
// weights of 15 bits, so sums are exact. If one tile takes all rows, it widens what it loads; for
// more rows, a span is widened once. The keys' scales multiply the scores. The values' scales
// multiply the weights, after these are added to the denominator.
#pragma once

#include "kernels/cpu/cache.inl"

namespace allspark::kernels {
namespace {

// Pairs of half bytes, less their zero points, as 16-bit integers.
static AS_ALWAYS_INLINE VecI LoadNibblePairs(const unsigned char* p, VecI zeros) {
  const VecI x = LoadBytes(p);
  return SubPairs16(And(Or(x, ShiftLeft<12>(x)), Set1Int(0xf000f)), zeros);
}

// Lanes as the cache stores them.
template <int kBits>
struct StoredLanes {
  static constexpr int64_t kBytes = kBits / 4;

  static AS_ALWAYS_INLINE VecI KeyZeros(const Span& keys, int64_t token) {
    return kBits == 4 ? LoadI(keys.zeros + token * 4) : Set1Int(0);
  }
  static AS_ALWAYS_INLINE VecI ValueZeros(const Span& values, int64_t group) {
    int32_t pair = 0;
    if (kBits == 4) __builtin_memcpy(&pair, values.zeros + group * 4, 4);
    return Set1Int(pair);
  }
  static AS_ALWAYS_INLINE VecI Load(const unsigned char* p, VecI zeros) {
    return kBits == 8 ? LoadBytePairs(p) : LoadNibblePairs(p, zeros);
  }
  // Scales follow the elements, so whole vectors may be read.
  static AS_ALWAYS_INLINE VecI LoadMasked(Mask, const unsigned char* p, VecI zeros) {
    return Load(p, zeros);
  }
};

template <int kKeyBits, int kValueBits>
struct QuantizedHead {
  static constexpr int64_t kGroup = 2;
  static constexpr bool kScaled = true;
  static constexpr int64_t kKeyPair = kKeyBits / 4, kValuePair = kValueBits / 4;  // bytes
  using StoredKeys = StoredLanes<kKeyBits>;
  using StoredValues = StoredLanes<kValueBits>;

  CacheParts parts;
  int64_t head_dim;

  // Of keys, or of values.
  __attribute__((always_inline)) inline int64_t TokenBytes(bool keys) const {
    return KvPartBytes((keys ? kKeyBits : kValueBits) == 8 ? DType::kInt8 : DType::kUInt4, 1,
                       head_dim);
  }
  // Of the part of kBits that starts at `data`.
  template <int kBits>
  __attribute__((always_inline)) inline float* Scales(unsigned char* data) const {
    return reinterpret_cast<float*>(data + head_dim / 2 * parts.block_size * (kBits / 4));
  }
  template <int kBits>
  __attribute__((always_inline)) inline unsigned char* Zeros(unsigned char* data) const {
    return reinterpret_cast<unsigned char*>(Scales<kBits>(data) + parts.block_size);
  }

  template <class Lanes>
  Span Keys(SpanRange range, const Staging& staging) const {
    if constexpr (Lanes::kBytes == kKeyPair) return KeysInPlace(range, staging);
    Span span;
    span.stride = kGranule * kLaneBytes;
    for (int64_t g = 0; g < kSpanGranules; ++g) {
      const int64_t position = range.Nearest(g);
      unsigned char* lanes =
          staging.lanes + (position - range.begin) / kGranule * head_dim / 2 * span.stride;
      span.granule[g] = lanes;
      if (position != range.begin + g * kGranule) continue;
      WidenKeys(position, lanes);
      CopyScales<kKeyBits>(parts.Keys(position), position, staging.key_scales);
    }
    return span;
  }
  template <class Lanes>
  Span Values(SpanRange range, const Staging& staging) const {
    if constexpr (Lanes::kBytes == kValuePair) return ValuesInPlace(range, staging);
    Span span;
    span.stride = head_dim * kLaneBytes;
    for (int64_t g = 0; g < kSpanGranules; ++g) {
      const int64_t position = range.Nearest(g);
      unsigned char* lanes =
          staging.lanes + (position - range.begin) / kGranule * kGranule / 2 * span.stride;
      span.granule[g] = lanes;
      // The last row may be written up to a vector too far. The next granule is written later and
      // overwrites that.
      if (position == range.begin + g * kGranule) WidenValues(position, lanes);
    }
    return span;
  }

  Span KeysInPlace(SpanRange range, const Staging& staging) const {
    Span span;
    span.stride = parts.block_size * kKeyPair;
    span.zeros = staging.lanes;
    for (int64_t g = 0; g < kSpanGranules; ++g) {
      const int64_t position = range.Nearest(g);
      unsigned char* data = parts.Keys(position);
      const int64_t token = parts.Token(position);
      span.granule[g] = data + token * kKeyPair;
      if (position != range.begin + g * kGranule) continue;
      CopyScales<kKeyBits>(data, position, staging.key_scales);
      for (int64_t t = 0; kKeyBits == 4 && t < kGranule; t += kLanes) {
        const VecI zero = LoadBytes(Zeros<4>(data) + token + t);
        StoreI(staging.lanes + (g * kGranule + t) * 4, Or(zero, ShiftLeft<16>(zero)));
      }
    }
    return span;
  }
  Span ValuesInPlace(SpanRange range, const Staging& staging) const {
    Span span;
    span.stride = head_dim * kValuePair;
    span.zeros = staging.lanes;
    for (int64_t g = 0; g < kSpanGranules; ++g) {
      const int64_t position = range.Nearest(g);
      unsigned char* data = parts.Values(position);
      const int64_t token = parts.Token(position);
      span.granule[g] = data + token / 2 * span.stride;
      if (kValueBits == 8 || position != range.begin + g * kGranule) continue;
      for (int64_t t = 0; t < kGranule; t += kLanes) {
        StoreInt16(reinterpret_cast<int16_t*>(staging.lanes) + g * kGranule + t,
                   LoadBytes(Zeros<4>(data) + token + t));
      }
    }
    return span;
  }

  // The values' scales are needed before the values themselves. They are copied after the scores,
  // because they are fetched while the scores are computed.
  void CopyValueScales(int64_t from, int64_t to, const Staging& staging) const {
    for (int64_t position = from / kGranule * kGranule; position < to; position += kGranule) {
      CopyScales<kValueBits>(parts.Values(position), position, staging.value_scales);
    }
  }

  // One granule.
  void WidenKeys(int64_t position, unsigned char* lanes) const {
    unsigned char* data = parts.Keys(position);
    const int64_t token = parts.Token(position);
    for (int64_t t = 0; t < kGranule; t += kLanes) {
      const VecI zero = kKeyBits == 4 ? LoadBytes(Zeros<4>(data) + token + t) : Set1Int(0);
      const VecI zeros = Or(zero, ShiftLeft<16>(zero));
      const unsigned char* from = data + (token + t) * kKeyPair;
      unsigned char* to = lanes + t * kLaneBytes;
      for (int64_t i = 0; i < head_dim / 2; ++i) {
        StoreI(to, kKeyBits == 8 ? LoadBytePairs(from) : LoadNibblePairs(from, zeros));
        from += parts.block_size * kKeyPair;
        to += kGranule * kLaneBytes;
      }
    }
  }
  void WidenValues(int64_t position, unsigned char* lanes) const {
    unsigned char* data = parts.Values(position);
    const int64_t token = parts.Token(position);
    for (int64_t t = token; t < token + kGranule; t += 2) {
      const unsigned char* from = data + t / 2 * head_dim * kValuePair;
      const VecI zeros =
          Set1Int(kValueBits == 4 ? Zeros<4>(data)[t] | Zeros<4>(data)[t + 1] << 16 : 0);
      for (int64_t d = 0; d < head_dim; d += kLanes) {
        StoreI(lanes + d * kLaneBytes, kValueBits == 8 ? LoadBytePairs(from + d * kValuePair)
                                                       : LoadNibblePairs(from + d, zeros));
      }
      lanes += head_dim * kLaneBytes;
    }
  }
  template <int kBits>
  __attribute__((always_inline)) inline void CopyScales(unsigned char* data, int64_t position,
                                                        float* scales) const {
    const float* from = Scales<kBits>(data) + parts.Token(position);
    for (int64_t t = 0; t < kGranule; t += kLanes) {
      StoreF(scales + position % kAttentionChunk + t, LoadF(from + t));
    }
  }
};

// Quantises one token's head as PagedKv (args.h) says.
template <int kBits>
struct HeadQuantizer {
  static constexpr int32_t kLeast = kBits == 8 ? -127 : 0, kMost = kBits == 8 ? 127 : 15;
  static constexpr float kSteps = kBits == 8 ? 127.0f : 15.0f;
  static constexpr int64_t kSlice = 64;

  float scale, inverse;
  int32_t zero;

  static AS_ALWAYS_INLINE HeadQuantizer Of(const float* x, int64_t n) {
    float range = HighestMagnitude(x, n), least = 0;
    const bool poisoned = range != range;
    if (kBits == 4) {
      VecF low = Zero(), high = Zero();
      for (int64_t i = 0; i < n; i += kLanes) {
        const VecF v = MaskLoadF(FirstLanes(n - i), x + i);
        low = Min(v, low);
        high = Max(v, high);
      }
      least = -ReduceMax(Neg(low));
      range = ReduceMax(high) - least;
    }
    HeadQuantizer q;
    q.scale = poisoned ? __builtin_nanf("") : range / kSteps;
    q.inverse = poisoned || range < kQuantizeTiny ? 0.0f : kSteps / range;
    q.zero = kBits == 4 && q.inverse > 0 ? Round(-least * q.inverse) : 0;
    return q;
  }
  static AS_ALWAYS_INLINE int32_t Round(float x) {
    int32_t rounded[kLanes];
    StoreI(rounded, RoundToInt(Set1(x)));
    return rounded[0];
  }
  // Quantises n elements of a slice. Requires: q holds a whole slice, with zeros beyond n.
  __attribute__((always_inline)) inline void Apply(const float* x, int64_t n, int8_t* q) const {
    for (int64_t i = 0; i < n; i += kLanes) {
      const VecF v = inverse == 0 ? Zero() : MaskLoadF(FirstLanes(n - i), x + i);
      StoreInt8(q + i, AddInt(RoundToInt(Mul(v, Set1(inverse))), Set1Int(zero)));
    }
    for (int64_t i = 0; i < kSlice; ++i) {
      q[i] = q[i] < kLeast ? kLeast : q[i] > kMost ? kMost : q[i];
    }
  }
};

// Quantises x into the keys or values of a token. A pair of values holds two tokens; the other
// token's half is kept.
template <int kBits, bool kKeys, class Head>
void WriteQuantized(const Head& head, unsigned char* data, int64_t token, const float* x) {
  constexpr int64_t kPairBytes = kBits / 4;
  constexpr int64_t kSlice = HeadQuantizer<kBits>::kSlice;
  const int64_t n = head.head_dim, block_size = head.parts.block_size;
  const auto quantize = HeadQuantizer<kBits>::Of(x, n);
  for (int64_t begin = 0; begin < n; begin += kSlice) {
    const int64_t count = Lower(kSlice, n - begin);
    int8_t q[kSlice] = {};
    quantize.Apply(x + begin, count, q);
    if (kKeys) {
      unsigned char* pair = data + (begin / 2 * block_size + token) * kPairBytes;
      for (int64_t i = 0; i < count; i += 2, pair += block_size * kPairBytes) {
        if (kBits == 8) {
          __builtin_memcpy(pair, q + i, 2);
        } else {
          *pair = static_cast<unsigned char>(q[i] | q[i + 1] << 4);
        }
      }
    } else {
      unsigned char* pairs = data + (token / 2 * n + begin) * kPairBytes;
      const int64_t odd = token % 2, shift = 4 * odd, other = 0xf0 >> shift;
      for (int64_t i = 0; i < count; ++i) {
        if (kBits == 8) {
          pairs[2 * i + odd] = static_cast<unsigned char>(q[i]);
        } else {
          pairs[i] = static_cast<unsigned char>((pairs[i] & other) | q[i] << shift);
        }
      }
    }
  }
  head.template Scales<kBits>(data)[token] = quantize.scale;
  if (kBits == 4)
    head.template Zeros<kBits>(data)[token] = static_cast<unsigned char>(quantize.zero);
}

template <int kKeyBits, int kValueBits>
void KvWriteQuantized(const KvWriteArgs& args) noexcept {
  for (int64_t h = 0; h < args.kv_heads; ++h) {
    const QuantizedHead<kKeyBits, kValueBits> head{CacheParts::Of(args.kv, args.block_table, h),
                                                   args.head_dim};
    for (int64_t t = 0; t < args.num_tokens; ++t) {
      const int64_t position = args.begin_position + t, token = head.parts.Token(position);
      const int64_t from = t * args.ld + h * args.head_dim;
      WriteQuantized<kKeyBits, true>(head, head.parts.Keys(position), token, args.k + from);
      WriteQuantized<kValueBits, false>(head, head.parts.Values(position), token, args.v + from);
    }
  }
}

}  // namespace
}  // namespace allspark::kernels
