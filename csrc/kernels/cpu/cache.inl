// The paged KV cache: where a head's keys and values lie, and writing them.
#pragma once

#include "kernels/cpu/attention_tile.inl"

namespace allspark::kernels {
namespace {

// One KV head of one layer. T: float, or uint16_t for bfloat16.
template <class T>
struct CacheHead {
  static constexpr int64_t kGroup = kLaneBytes / static_cast<int64_t>(sizeof(T));

  unsigned char* pool;
  int64_t block_stride, k_offset, v_offset, block_size;
  const int32_t* block_table;

  AS_ALWAYS_INLINE CacheHead Of(const PagedKv& kv, const int32_t* block_table, int64_t kv_head) {
    const int64_t head = kv_head * kv.head_stride;
    return {kv.pool,       kv.block_stride, kv.k_offset + head, kv.v_offset + head,
            kv.block_size, block_table};
  }
  // [head_dim / kGroup][block_size] lanes.
  __attribute__((always_inline)) inline unsigned char* Keys(int64_t position) const {
    return pool + block_table[position / block_size] * block_stride + k_offset;
  }
  // [block_size / kGroup][head_dim] lanes.
  __attribute__((always_inline)) inline unsigned char* Values(int64_t position) const {
    return pool + block_table[position / block_size] * block_stride + v_offset;
  }

  // Where attention finds positions [from, to), not empty, of the kSpan that start at `begin`.
  __attribute__((always_inline)) inline Span KeySpan(int64_t begin, int64_t from,
                                                     int64_t to) const {
    Span span;
    span.stride = block_size * kLaneBytes;
    for (int64_t g = 0; g < kSpanGranules; ++g) {
      const int64_t position = Nearest(begin + g * kGranule, from, to);
      span.granule[g] = Keys(position) + position % block_size * kLaneBytes;
    }
    return span;
  }
  __attribute__((always_inline)) inline Span ValueSpan(int64_t begin, int64_t from, int64_t to,
                                                       int64_t head_dim) const {
    Span span;
    span.stride = head_dim * kLaneBytes;
    for (int64_t g = 0; g < kSpanGranules; ++g) {
      const int64_t position = Nearest(begin + g * kGranule, from, to);
      span.granule[g] = Values(position) + position % block_size / kGroup * span.stride;
    }
    return span;
  }
  // The first position of the granule nearest to `position` that holds one of [from, to).
  AS_ALWAYS_INLINE int64_t Nearest(int64_t position, int64_t from, int64_t to) {
    const int64_t first = from / kGranule * kGranule, last = (to - 1) / kGranule * kGranule;
    return Higher(first, Lower(position, last));
  }
};

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
    const CacheHead<T> head = CacheHead<T>::Of(args.kv, args.block_table, h);
    const float* k = args.k + h * head_dim;
    const float* v = args.v + h * head_dim;
    for (int64_t t = 0; t < args.num_tokens; ++t) {
      const int64_t position = args.begin_position + t;
      T* keys = reinterpret_cast<T*>(head.Keys(position)) + position % block_size * kGroup;
      WriteKey(k + t * args.ld, head_dim, keys, block_size);
    }
    for (int64_t t = 0; t < args.num_tokens;) {
      const int64_t position = args.begin_position + t;
      const int64_t token = position % block_size;
      T* values = reinterpret_cast<T*>(head.Values(position)) + token / kGroup * head_dim * kGroup;
      t += WriteValues(v + t * args.ld, args.ld, head_dim, values, token, args.num_tokens - t);
    }
  }
}

}  // namespace
}  // namespace allspark::kernels
