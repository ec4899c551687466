// KvWrite: stores the keys and values of a step's tokens in one layer of the paged cache. Splits
// over tokens, within a sequence only where no two parts share a group of tokens that the cache
// packs together.
#pragma once

#include "ops/op_context.h"
#include "ops/sequence_range.h"

namespace allspark {

// k, v: [tokens, kv_heads * head_dim] float32 with one row stride. dtype: of the cache. Requires:
// the ranges follow one another and begin at row 0.
void KvWrite(const OpContext& context, const kernels::PagedKv& kv, DType dtype,
             const SequenceRange* sequences, int64_t num_sequences, const ConstMatrix& k,
             const ConstMatrix& v, int64_t kv_heads, int64_t head_dim);

}  // namespace allspark
