// How the KV pool lies in the CPU's memory: KV head after KV head, so that a node of a NUMA machine
// can hold whole heads. Within a head there are extents (kv_cache/extent.h), within an extent layer
// after layer, and of each layer the extent's blocks of K, then those of V.
#pragma once

#include <cstdint>

#include "kernels/args.h"
#include "kv_cache/extent.h"
#include "ops/kv_pool.h"

namespace allspark::cpu {

// Of one head's keys or values in a block.
inline int64_t KeyBytes(const KvShape& shape) {
  return kernels::KvPartBytes(kernels::KeyDType(shape.dtype), shape.block_size, shape.head_dim);
}
inline int64_t ValueBytes(const KvShape& shape) {
  return kernels::KvPartBytes(kernels::ValueDType(shape.dtype), shape.block_size, shape.head_dim);
}

// Of one head in a block, all layers.
inline int64_t KvHeadBytes(const KvShape& shape) {
  return shape.num_layers * (KeyBytes(shape) + ValueBytes(shape));
}

inline int64_t KvBlockBytes(const KvShape& shape) { return shape.kv_heads * KvHeadBytes(shape); }

inline kernels::PagedKv PagedKvOf(const KvLayer& kv) {
  const KvShape& shape = kv.shape();
  kernels::PagedKv paged{};
  paged.pool = kv.pool.data;
  paged.extent_blocks = ExtentBlocks(kv.pool.num_blocks);
  paged.extent_stride = paged.extent_blocks * KvHeadBytes(shape);
  paged.block_size = shape.block_size;
  paged.k.block_stride = KeyBytes(shape);
  paged.v.block_stride = ValueBytes(shape);
  paged.k.head_stride = kv.pool.num_blocks * KvHeadBytes(shape);
  paged.v.head_stride = paged.k.head_stride;
  paged.k.offset = kv.layer * paged.extent_blocks * (paged.k.block_stride + paged.v.block_stride);
  paged.v.offset = paged.k.offset + paged.extent_blocks * paged.k.block_stride;
  return paged;
}

// Calls visit(paged, side, kv_head) for every part of a block: PagedKv::PartAt says where it lies,
// and side.block_stride how many bytes it has.
template <typename Visit>
void ForEachPart(const KvPool& pool, Visit&& visit) {
  for (int64_t layer = 0; layer < pool.shape.num_layers; ++layer) {
    const kernels::PagedKv paged = PagedKvOf({pool, layer});
    for (const kernels::PagedKv::Side* side : {&paged.k, &paged.v}) {
      for (int64_t head = 0; head < pool.shape.kv_heads; ++head) visit(paged, *side, head);
    }
  }
}

}  // namespace allspark::cpu
