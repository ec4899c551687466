// The paged KV cache: where a head's keys and values are stored, and writing them.
#pragma once

#include "kernels/cpu/attention_tile.inl"

namespace allspark::kernels {
namespace {

// Where the keys and values of one KV head of one layer are stored.
struct CacheParts {
  unsigned char* pool;
  int64_t extent_stride, k_offset, k_stride, v_offset, v_stride, block_size, extent_blocks;
  const int32_t* block_table;
  // log2 of block_size and extent_blocks. Divisions would cost more than a granule's arithmetic.
  int block_shift, extent_shift;

  static AS_ALWAYS_INLINE CacheParts Of(const PagedKv& kv, const int32_t* block_table,
                                        int64_t kv_head) {
    return {kv.pool,
            kv.extent_stride,
            kv.k.offset + kv_head * kv.k.head_stride,
            kv.k.block_stride,
            kv.v.offset + kv_head * kv.v.head_stride,
            kv.v.block_stride,
            kv.block_size,
            kv.extent_blocks,
            block_table,
            __builtin_ctzll(static_cast<uint64_t>(kv.block_size)),
            __builtin_ctzll(static_cast<uint64_t>(kv.extent_blocks))};
  }
  __attribute__((always_inline)) inline unsigned char* At(int64_t position, int64_t offset,
                                                          int64_t stride) const {
    const int64_t block = block_table[position >> block_shift];
    return pool + (block >> extent_shift) * extent_stride + offset +
           (block & (extent_blocks - 1)) * stride;
  }
  __attribute__((always_inline)) inline unsigned char* Keys(int64_t position) const {
    return At(position, k_offset, k_stride);
  }
  __attribute__((always_inline)) inline unsigned char* Values(int64_t position) const {
    return At(position, v_offset, v_stride);
  }
  // The position within its block.
  __attribute__((always_inline)) inline int64_t Token(int64_t position) const {
    return position & (block_size - 1);
  }
};

// Positions [from, to), not empty, within the span of kSpan positions that begins at `begin`.
struct SpanRange {
  int64_t begin, from, to;

  // The first position of the nearest granule to granule g that holds positions of the range.
  __attribute__((always_inline)) inline int64_t Nearest(int64_t g) const {
    const int64_t first = from / kGranule * kGranule, last = (to - 1) / kGranule * kGranule;
    return Higher(first, Lower(begin + g * kGranule, last));
  }
};

// Memory for a quantised cache: a span's widened elements or its zero points, and the scales of a
// chunk's keys and values.
struct Staging {
  unsigned char* lanes;
  float* key_scales;    // [kAttentionChunk]
  float* value_scales;  // [kAttentionChunk]
};

// One KV head of one layer. T: float, or uint16_t for bfloat16.
template <class T>
struct CacheHead {
  static constexpr int64_t kGroup = kLaneBytes / static_cast<int64_t>(sizeof(T));
  static constexpr bool kScaled = false;
  using StoredKeys = WideLanes;
  using StoredValues = WideLanes;

  CacheParts parts;
  int64_t head_dim;

  // Where attention finds keys and values.
  template <class Lanes>
  __attribute__((always_inline)) inline Span Keys(SpanRange range, const Staging&) const {
    Span span;
    span.stride = parts.block_size * kLaneBytes;
    for (int64_t g = 0; g < kSpanGranules; ++g) {
      const int64_t position = range.Nearest(g);
      span.granule[g] = parts.Keys(position) + parts.Token(position) * kLaneBytes;
    }
    return span;
  }
  template <class Lanes>
  __attribute__((always_inline)) inline Span Values(SpanRange range, const Staging&) const {
    Span span;
    span.stride = head_dim * kLaneBytes;
    for (int64_t g = 0; g < kSpanGranules; ++g) {
      const int64_t position = range.Nearest(g);
      span.granule[g] = parts.Values(position) + parts.Token(position) / kGroup * span.stride;
    }
    return span;
  }
  // Of keys, or of values.
  __attribute__((always_inline)) inline int64_t TokenBytes(bool) const {
    return head_dim * static_cast<int64_t>(sizeof(T));
  }
};

// The keys or values of a later span, so that they can be fetched in time.
template <class Head>
static AS_ALWAYS_INLINE Ahead AheadOf(const Head& head, SpanRange range, bool keys) {
  const CacheParts& parts = head.parts;
  // A granule's share of its block's part, and the vectors that a tile reads from a granule.
  const int64_t share = head.TokenBytes(keys) * kGranule, vectors = head.head_dim / Head::kGroup;
  Ahead ahead;
  ahead.step = CeilDiv(share, vectors);
  for (int64_t g = 0; g < kSpanGranules; ++g) {
    const int64_t position = range.Nearest(g);
    ahead.granule[g] = (keys ? parts.Keys(position) : parts.Values(position)) +
                       parts.Token(position) / kGranule * share;
  }
  return ahead;
}

// Row i of kLanes vectors becomes lane i of each: log2(kLanes) perfect shuffles.
static AS_ALWAYS_INLINE void Transpose(VecF (&x)[kLanes]) {
  for (int done = 1; done < kLanes; done *= 2) {
    VecF y[kLanes];
    AS_UNROLL for (int i = 0; i < kLanes / 2; ++i) {
      Interleave(x[i], x[i + kLanes / 2], &y[2 * i], &y[2 * i + 1]);
    }
    AS_UNROLL for (int i = 0; i < kLanes; ++i) x[i] = y[i];
  }
}

// One vector of lanes of a token's key, from `k` on. The second parameter gives the element type.
static AS_ALWAYS_INLINE VecF KeyLanes(const float* k, const float*) { return LoadF(k); }
static AS_ALWAYS_INLINE VecF KeyLanes(const float* k, const uint16_t*) {
  VecF even, odd;
  Deinterleave(LoadF(k), LoadF(k + kLanes), &even, &odd);
  return AsFloat(PackPairs(even, odd));
}
static AS_ALWAYS_INLINE void StoreElement(float* p, float x) { *p = x; }
static AS_ALWAYS_INLINE void StoreElement(uint16_t* p, float x) { *p = ToBFloat16(x).bits; }

// keys: lane 0 of the first token. A token's lanes are block_size lanes apart. kTokens: 1, or
// kLanes consecutive tokens.
template <int kTokens, class T>
void WriteKeys(const float* k, int64_t ld, int64_t head_dim, T* keys, int64_t block_size) {
  constexpr int64_t kGroup = CacheHead<T>::kGroup, kDims = kLanes * kGroup;
  int64_t d = 0;
  for (; d + kDims <= head_dim; d += kDims) {
    T* to = keys + d * block_size;
    if constexpr (kTokens == 1) {
      float lanes[kLanes];
      StoreF(lanes, KeyLanes(k + d, keys));
      for (int64_t i = 0; i < kLanes; ++i) {
        __builtin_memcpy(to + i * kGroup * block_size, lanes + i, kLaneBytes);
      }
    } else {
      VecF x[kLanes];
      AS_UNROLL for (int t = 0; t < kLanes; ++t) x[t] = KeyLanes(k + t * ld + d, keys);
      Transpose(x);
      AS_UNROLL for (int i = 0; i < kLanes; ++i) {
        StoreF(reinterpret_cast<float*>(to + i * kGroup * block_size), x[i]);
      }
    }
  }
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t e = d; e < head_dim; ++e) {
      StoreElement(keys + (e / kGroup * block_size + t) * kGroup + e % kGroup, k[t * ld + e]);
    }
  }
}

// values: the lanes of the token's group. Writes the token at `v`, and also the next one if the two
// make a pair and `left` is at least 2. Returns the number of tokens written.
static AS_ALWAYS_INLINE int64_t WriteValues(const float* v, int64_t, int64_t head_dim,
                                            float* values, int64_t, int64_t) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Mask mask = FirstLanes(head_dim - d);
    MaskStoreF(mask, values + d, MaskLoadF(mask, v + d));
  }
  return 1;
}
static AS_ALWAYS_INLINE int64_t WriteValues(const float* v, int64_t ld, int64_t head_dim,
                                            uint16_t* values, int64_t token, int64_t left) {
  const bool pair = token % 2 == 0 && left >= 2;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Mask mask = FirstLanes(head_dim - d);
    const VecF x = MaskLoadF(mask, v + d);
    VecI lanes;
    if (pair) {
      lanes = PackPairs(x, MaskLoadF(mask, v + ld + d));
    } else {
      // Half a pair: the other half belongs to another token and is kept.
      const VecI old = MaskLoadI(mask, values + 2 * d);
      lanes = token % 2 == 0 ? Or(And(old, Set1Int(-65536)), RoundBf16(x))
                             : Or(And(old, Set1Int(65535)), ShiftLeft<16>(RoundBf16(x)));
    }
    MaskStoreI(mask, values + 2 * d, lanes);
  }
  return pair ? 2 : 1;
}

template <class T>
void KvWrite(const KvWriteArgs& args) noexcept {
  constexpr int64_t kGroup = CacheHead<T>::kGroup;
  const int64_t block_size = args.kv.block_size, head_dim = args.head_dim;
  for (int64_t h = 0; h < args.kv_heads; ++h) {
    const CacheParts head = CacheParts::Of(args.kv, args.block_table, h);
    const float* k = args.k + h * head_dim;
    const float* v = args.v + h * head_dim;
    for (int64_t t = 0; t < args.num_tokens;) {
      const int64_t position = args.begin_position + t;
      T* keys = reinterpret_cast<T*>(head.Keys(position)) + head.Token(position) * kGroup;
      if (position % kLanes == 0 && t + kLanes <= args.num_tokens) {
        WriteKeys<kLanes>(k + t * args.ld, args.ld, head_dim, keys, block_size);
        t += kLanes;
      } else {
        WriteKeys<1>(k + t * args.ld, args.ld, head_dim, keys, block_size);
        ++t;
      }
    }
    for (int64_t t = 0; t < args.num_tokens;) {
      const int64_t position = args.begin_position + t;
      const int64_t token = head.Token(position);
      T* values = reinterpret_cast<T*>(head.Values(position)) + token / kGroup * head_dim * kGroup;
      t += WriteValues(v + t * args.ld, args.ld, head_dim, values, token, args.num_tokens - t);
    }
  }
}

}  // namespace
}  // namespace allspark::kernels
