// Embedding: looks up one row of the table per token, as float32.
#pragma once

#include "ops/op_context.h"

namespace allspark {

// A table [vocab, cols]: row-major, or packed as a GEMM weight when it is also the lm_head.
struct EmbeddingWeight {
  const void* data = nullptr;
  DType dtype = DType::kUndefined;
  int64_t cols = 0;
  bool packed = false;
  WeightScales scales = {};  // of quantised tables, which are packed
};

// out[r, :] = table[ids[r], :], or += where `accumulate` (row-major tables only). out: [rows, cols]
// float32. Requires: the table has a row of every id.
void EmbeddingLookup(const OpContext& context, const EmbeddingWeight& table, const int32_t* ids,
                     const Matrix& out, bool accumulate = false);

}  // namespace allspark
