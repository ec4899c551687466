// Latent attention (MLA, DeepSeek-V2, 2024): the keys and values of all heads are products of one
// latent per token. The cache keeps only the latent and a rotated key. The products are never
// computed: a query head is multiplied by its k_up and then attends to the latent itself, which is
// both key and value; v_up then turns the result into the head's value ("absorbed"). So attention
// has one KV head.
#pragma once

#include "model/attention.h"

namespace allspark {

// Reads the stream; the key and the value of a token are the same row, its latent and its rotated
// key.
QueryKeyValue ProjectLatents(const OpContext& context, const DecoderShape& shape,
                             const AttentionWeights& weights, const StepInput& step,
                             const Workspace& w);

// Turns the output of attention over latents into the heads' values, [tokens, o_cols] float32.
// attended: [tokens, q_cols] in the compute type. `tasks`: room for as many as query heads.
Matrix ValuesOfLatents(const OpContext& context, const DecoderShape& shape,
                       const AttentionWeights& weights, const Matrix& attended,
                       std::vector<LinearTask>& tasks, const Workspace& w);

}  // namespace allspark
