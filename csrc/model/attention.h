// The attention half of a layer: norm, qkv, rope, cache write, attention, output projection into
// the residual.
#pragma once

#include <cstdint>

#include "model/decoder_weights.h"
#include "model/step_input.h"
#include "model/workspace.h"
#include "ops/attention.h"
#include "ops/kv_pool.h"

namespace allspark {

// What attention reads and the cache keeps: [tokens, heads * head_dim] float32 each.
struct QueryKeyValue {
  Matrix q, k;
  ConstMatrix v;  // with latents, the same memory as k
};

AttentionParams MakeAttentionParams(const DecoderShape& shape, int64_t window, int64_t max_length);

// Adds the layer's attention to w.residual and leaves its keys and values in the cache.
void RunAttention(const OpContext& context, const DecoderShape& shape,
                  const AttentionWeights& weights, const KvLayer& kv, const StepInput& step,
                  const Workspace& w);

}  // namespace allspark
