#include "model/attention.h"

#include "model/latent_attention.h"
#include "model/residual.h"
#include "ops/hadamard.h"
#include "ops/kv_write.h"
#include "ops/logn.h"
#include "ops/norm.h"
#include "ops/scale.h"

namespace allspark {
namespace {

QueryKeyValue Project(const OpContext& context, const DecoderShape& shape,
                      const AttentionWeights& weights, const StepInput& step, const Workspace& w) {
  const ConstMatrix read = ReadResidual(context, weights.norm, weights.qkv.input, w);
  const ConstMatrix normed = InOrder(context, read, weights.qkv, w);
  Linear(context, normed, weights.qkv, /*accumulate=*/false, w.qkv,
         step.lora->Layer(context, normed, step.layer, &LoraLayer::qkv, w.lora));
  if (!shape.qkv_scaling.is_identity()) {
    Scale(context, w.qkv, shape.qkv_scaling, /*accumulate=*/false, w.qkv);
  }
  if (shape.qk_norm_whole) {
    // Each is normalised as one wide head: kv_cols divide q_cols, so the keys are a head of that
    // size.
    NormHeads(context, w.qkv, 0, 1, shape.q_cols(), weights.q_norm);
    NormHeads(context, w.qkv, shape.q_heads / shape.kv_heads, 1, shape.kv_cols(), weights.k_norm);
  } else if (weights.q_norm.weight != nullptr) {
    NormHeads(context, w.qkv, 0, shape.q_heads, shape.head_dim, weights.q_norm);
    NormHeads(context, w.qkv, shape.q_heads, shape.kv_heads, shape.head_dim, weights.k_norm);
  }
  if (step.rope.rotary_dim > 0) {
    // Keys follow the queries in a row, so one call rotates both.
    Rope(context, w.qkv, shape.q_heads + shape.kv_heads, shape.head_dim, step.positions, step.rope);
  }
  const int64_t k_begin = shape.q_cols(), v_begin = k_begin + shape.kv_cols();
  return {Columns(w.qkv, 0, shape.q_cols()), Columns(w.qkv, k_begin, shape.kv_cols()),
          Columns(w.qkv, v_begin, shape.kv_cols())};
}

}  // namespace

AttentionParams MakeAttentionParams(const DecoderShape& shape, int64_t window, int64_t max_length) {
  AttentionParams params;
  params.q_heads = shape.q_heads;
  params.kv_heads = shape.kv_heads;
  params.head_dim = shape.head_dim;
  params.scale = shape.attention_scale;
  params.window = window;
  params.soft_cap = shape.attention_soft_cap;
  params.max_length = max_length;
  return params;
}

void RunAttention(const OpContext& context, const DecoderShape& shape,
                  const AttentionWeights& weights, const KvLayer& kv, const StepInput& step,
                  const Workspace& w) {
  const bool latents = shape.has_latents();
  const QueryKeyValue qkv = latents ? ProjectLatents(context, shape, weights, step, w)
                                    : Project(context, shape, weights, step, w);
  if (step.logn_length > 0) LogN(context, step.positions, step.logn_length, qkv.q);
  Matrix keys = qkv.k;
  if (shape.rotates_keys) {
    Hadamard(context, qkv.q, shape.head_dim, qkv.q);
    if (latents) keys = Columns(w.latent.rotated_keys, 0, shape.head_dim);
    Hadamard(context, qkv.k, shape.head_dim, keys);
  }
  KvWrite(context, kv, step.sequences, keys, qkv.v);
  // Written in float32 if it is quantised next, otherwise in the compute type, in which v_up reads
  // latents.
  const InputFormat o_input = weights.o.input;
  Matrix attended =
      w.attended.As(o_input.dtype == DType::kInt8 && !latents ? DType::kFloat32 : shape.compute);
  AttentionParams params = MakeAttentionParams(shape, weights.window, step.max_length);
  params.slopes = step.alibi_slopes;
  PagedAttention(context, params, kv, step.sequences, qkv.q, w.attention_scratch, attended);
  if (latents) attended = ValuesOfLatents(context, shape, weights, attended, *step.tasks, w);
  const ConstMatrix rounded = Rounded(context, attended, o_input, w.o_input);
  const ConstMatrix x = InOrder(context, rounded, weights.o, w);
  AddToResidual(context, x, weights.o, weights.post_norm, shape.residual_scaling,
                step.lora->Layer(context, x, step.layer, &LoraLayer::o, w.lora), w);
}

}  // namespace allspark
