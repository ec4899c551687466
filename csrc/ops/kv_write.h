// KvWrite: stores the keys and values of a step's tokens in one layer of the paged cache.
#pragma once

#include "ops/kv_pool.h"
#include "ops/op_context.h"
#include "ops/sequence_range.h"

namespace allspark {

// k, v: [tokens, kv_heads * head_dim] float32 with the same row stride.
// Requires: the ranges follow one another and begin at row 0. Two of them must not write a block
// that they share, unless nobody reads it: a word holds elements of several tokens.
void KvWrite(const OpContext& context, const KvLayer& kv, const SequenceRanges& sequences,
             const ConstMatrix& k, const ConstMatrix& v);

}  // namespace allspark
