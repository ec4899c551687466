// The paged KV cache: where a head's keys and values lie, and writing them.
#pragma once

#include "kernels/cpu/attention_tile.inl"

namespace allspark::kernels {
namespace {

// Where the parts of one KV head of one layer lie.
struct CacheParts {
  unsigned char* pool;
  int64_t block_stride, k_offset, v_offset, block_size;
  const int32_t* block_table;
  int block_shift;  // log2(block_size): divisions would cost more than a granule's arithmetic

  AS_ALWAYS_INLINE CacheParts Of(const PagedKv& kv, const int32_t* block_table, int64_t kv_head) {
    const int64_t head = kv_head * kv.head_stride;
    return {kv.pool,
            kv.block_stride,
            kv.k_offset + head,
            kv.v_offset + head,
            kv.block_size,
            block_table,
            __builtin_ctzll(static_cast<uint64_t>(kv.block_size))};
  }
  __attribute__((always_inline)) inline unsigned char* Block(int64_t position) const {
    return pool + block_table[position >> block_shift] * block_stride;
  }
  __attribute__((always_inline)) inline unsigned char* Keys(int64_t position) const {
    return Block(position) + k_offset;
  }
  __attribute__((always_inline)) inline unsigned char* Values(int64_t position) const {
    return Block(position) + v_offset;
  }
  // Within its block.
  __attribute__((always_inline)) inline int64_t Token(int64_t position) const {
    return position & (block_size - 1);
  }
};

// Positions [from, to), not empty, of the kSpan that start at `begin`.
struct SpanRange {
  int64_t begin, from, to;

  // Of the granule nearest to granule g that holds some of them, the first position.
  __attribute__((always_inline)) inline int64_t Nearest(int64_t g) const {
    const int64_t first = from / kGranule * kGranule, last = (to - 1) / kGranule * kGranule;
    return Higher(first, Lower(begin + g * kGranule, last));
  }
};

// Of a quantised cache: where a span's elements are widened to, and the scales of a chunk's keys
// and values.
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

  CacheParts parts;
  int64_t head_dim;

  // Where attention finds keys and values.
  __attribute__((always_inline)) inline Span KeySpan(SpanRange range, const Staging&) const {
    Span span;
    span.stride = parts.block_size * kLaneBytes;
    for (int64_t g = 0; g < kSpanGranules; ++g) {
      const int64_t position = range.Nearest(g);
      span.granule[g] = parts.Keys(position) + parts.Token(position) * kLaneBytes;
    }
    return span;
  }
  __attribute__((always_inline)) inline Span ValueSpan(SpanRange range, const Staging&) const {
    Span span;
    span.stride = head_dim * kLaneBytes;
    for (int64_t g = 0; g < kSpanGranules; ++g) {
      const int64_t position = range.Nearest(g);
      span.granule[g] = parts.Values(position) + parts.Token(position) / kGroup * span.stride;
    }
    return span;
  }
  __attribute__((always_inline)) inline int64_t TokenBytes() const {
    return head_dim * static_cast<int64_t>(sizeof(T));
  }
};

// What KeySpan and ValueSpan are going to read, to be fetched in time.
template <class Head>
AS_ALWAYS_INLINE Ahead AheadOf(const Head& head, SpanRange range, bool keys) {
  const CacheParts& parts = head.parts;
  // A granule's share of its block's part, and the vectors that a tile reads from a granule.
  const int64_t share = head.TokenBytes() * kGranule, vectors = head.head_dim / Head::kGroup;
  Ahead ahead;
  ahead.step = (share + vectors - 1) / vectors;
  for (int64_t g = 0; g < kSpanGranules; ++g) {
    const int64_t position = range.Nearest(g);
    ahead.granule[g] = (keys ? parts.Keys(position) : parts.Values(position)) +
                       parts.Token(position) / kGranule * share;
  }
  return ahead;
}

// keys: lane 0 of the token; lane d / kGroup is block_size lanes further each.
AS_ALWAYS_INLINE void WriteKey(const float* k, int64_t head_dim, float* keys, int64_t block_size) {
  for (int64_t d = 0; d < head_dim; ++d) keys[d * block_size] = k[d];
}
AS_ALWAYS_INLINE void WriteKey(const float* k, int64_t head_dim, uint16_t* keys,
                               int64_t block_size) {
  uint16_t narrow[kLanes];
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    StoreBf16(narrow, LoadF(k + d));
    for (int64_t i = 0; i < kLanes; i += 2) {
      __builtin_memcpy(keys + (d + i) * block_size, narrow + i, 4);
    }
  }
  for (; d < head_dim; ++d) keys[d / 2 * block_size * 2 + d % 2] = ToBFloat16(k[d]).bits;
}

// values: the lanes of the token's pair. Writes tokens v, v + ld while they lie in [begin, end) of
// the block; returns how many it wrote.
AS_ALWAYS_INLINE int64_t WriteValues(const float* v, int64_t, int64_t head_dim, float* values,
                                     int64_t, int64_t) {
  for (int64_t d = 0; d < head_dim; ++d) values[d] = v[d];
  return 1;
}
AS_ALWAYS_INLINE int64_t WriteValues(const float* v, int64_t ld, int64_t head_dim, uint16_t* values,
                                     int64_t token, int64_t left) {
  if (token % 2 != 0 || left < 2) {
    // Half a pair: the neighbour's half is another token's and stays.
    uint16_t* half = values + token % 2;
    for (int64_t d = 0; d < head_dim; ++d) half[2 * d] = ToBFloat16(v[d]).bits;
    return 1;
  }
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Mask mask = FirstLanes(head_dim - d);
    MaskStoreI(mask, values + 2 * d,
               PackPairs(MaskLoadF(mask, v + d), MaskLoadF(mask, v + ld + d)));
  }
  return 2;
}

template <class T>
void KvWrite(const KvWriteArgs& args, Stream) noexcept {
  constexpr int64_t kGroup = CacheHead<T>::kGroup;
  const int64_t block_size = args.kv.block_size, head_dim = args.head_dim;
  for (int64_t h = 0; h < args.kv_heads; ++h) {
    const CacheParts head = CacheParts::Of(args.kv, args.block_table, h);
    const float* k = args.k + h * head_dim;
    const float* v = args.v + h * head_dim;
    for (int64_t t = 0; t < args.num_tokens; ++t) {
      const int64_t position = args.begin_position + t;
      T* keys = reinterpret_cast<T*>(head.Keys(position)) + head.Token(position) * kGroup;
      WriteKey(k + t * args.ld, head_dim, keys, block_size);
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
