// PagedAttention: causal attention of a step's tokens against one layer of the paged cache.
#pragma once

#include "ops/kv_pool.h"
#include "ops/op_context.h"
#include "ops/sequence_range.h"

namespace allspark {

struct AttentionParams {
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  float scale = 1.0f;
  int64_t window = 0;     // keys seen, the token itself included; 0: all
  float soft_cap = 0.0f;  // 0: none
  // [q_heads] or null: scores get slope * (key position - query position).
  const float* slopes = nullptr;
  int64_t max_length = 0;  // of a sequence, from which the scratch memory follows; 0: any
};

// q, out: [tokens, q_heads * head_dim]; q float32, out in the compute dtype. The keys of these
// tokens must be in the cache already. scratch: DeviceOps::AttentionScratch(params) floats.
void PagedAttention(const OpContext& context, const AttentionParams& params, const KvLayer& kv,
                    const SequenceRanges& sequences, const ConstMatrix& q, float* scratch,
                    const Matrix& out);

}  // namespace allspark
