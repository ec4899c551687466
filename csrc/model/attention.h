// The attention half of a layer: norm, qkv, rope, cache write, attention, output projection into
// the residual.
#pragma once

#include <cstdint>
#include <vector>

#include "model/decoder_weights.h"
#include "model/lora.h"
#include "model/workspace.h"
#include "ops/attention.h"
#include "ops/kv_pool.h"
#include "ops/linear_each.h"
#include "ops/rope.h"
#include "ops/sequence_range.h"

namespace allspark {

// What all layers of one step share.
struct StepInput {
  SequenceRanges sequences;
  const int32_t* positions = nullptr;   // [tokens]
  RopeView rope;                        // rotary_dim 0: none
  int64_t max_length = 0;               // of a sequence, as in WorkspaceSize
  int64_t logn_length = 0;              // the length that LogN counts from; 0: no LogN
  const float* alibi_slopes = nullptr;  // [q_heads]; null: none
  int64_t layer = 0;
  LoraBatch* lora = nullptr;
  std::vector<LinearTask>* tasks = nullptr;  // room for as many as query heads
};

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
