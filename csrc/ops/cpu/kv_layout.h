// How the KV pool lies in the CPU's memory: in extents (kv_cache/extent.h). Within an extent there
// is layer after layer, of each layer K of all KV heads, then V of all, and of each head the
// extent's blocks one after another.
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

inline int64_t KvBlockBytes(const KvShape& shape) {
  return shape.num_layers * shape.kv_heads * (KeyBytes(shape) + ValueBytes(shape));
}

inline kernels::PagedKv PagedKvOf(const KvLayer& kv) {
  const KvShape& shape = kv.shape();
  kernels::PagedKv paged{};
  paged.pool = kv.pool.data;
  paged.extent_blocks = ExtentBlocks(kv.pool.num_blocks);
  paged.extent_stride = paged.extent_blocks * KvBlockBytes(shape);
  paged.block_size = shape.block_size;
  paged.k.block_stride = KeyBytes(shape);
  paged.v.block_stride = ValueBytes(shape);
  paged.k.head_stride = paged.extent_blocks * paged.k.block_stride;
  paged.v.head_stride = paged.extent_blocks * paged.v.block_stride;
  paged.k.offset = kv.layer * shape.kv_heads * (paged.k.head_stride + paged.v.head_stride);
  paged.v.offset = paged.k.offset + shape.kv_heads * paged.k.head_stride;
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
