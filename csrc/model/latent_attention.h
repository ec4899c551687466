// Latent attention (MLA, DeepSeek-V2, 2024): the keys and values of all heads are products of one
// latent per token, which is all that the cache keeps. Those products are never formed: a query
// head times its k_up meets the latent itself, as if it were the only key, and so is the value,
// which v_up takes up again for each head ("absorbed"). So attention is that of one KV head.
#pragma once

#include "model/attention.h"

namespace allspark {

// Reads the stream; the key and the value of a token are the same row, its latent and its rotated
// key.
QueryKeyValue ProjectLatents(const OpContext& context, const DecoderShape& shape,
                             const AttentionWeights& weights, const StepInput& step,
                             const Workspace& w);

// What attention gives over latents as the heads' values, [tokens, o_cols] float32. attended:
// [tokens, q_cols] in the compute type. `tasks`: room for as many as query heads.
Matrix ValuesOfLatents(const OpContext& context, const DecoderShape& shape,
                       const AttentionWeights& weights, const Matrix& attended,
                       std::vector<LinearTask>& tasks, const Workspace& w);

}  // namespace allspark
