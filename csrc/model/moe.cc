#include "model/moe.h"

#include "model/residual.h"
#include "ops/experts.h"
#include "ops/quantize.h"

namespace allspark {
namespace {

// Where gate and up write their result: `gated`, or float32 if it is quantised afterwards.
Matrix GatedOutput(const Matrix& gated, const Matrix& gated_float) {
  return gated.dtype == DType::kInt8 ? gated_float : gated;
}

}  // namespace

void RunExperts(const OpContext& context, const DecoderShape& shape, const MoeWeights& weights,
                int64_t layer, LoraBatch& lora, const Workspace& w) {
  const MoeWorkspace& moe = w.moe;
  RouterParams router = shape.router;
  router.bias = weights.router_bias;
  // The stream is read anew where the next product wants it in another format.
  ConstMatrix normed = ReadResidual(context, weights.norm, weights.router.activation, w);
  const auto read_as = [&](const InputFormat& format) {
    if (normed.format() != format) normed = ReadResidual(context, weights.norm, format, w);
  };
  Linear(context, normed, weights.router, /*accumulate=*/false, moe.logits);
  Route(context, moe.logits, router, moe.routing);

  const Matrix gathered = moe.gathered.As(weights.gate_up.activation);
  read_as(gathered.format());
  GatherRows(context, normed, moe.routing.tokens, gathered);
  const Matrix gated = moe.gated.As(weights.down.activation);
  const Matrix shared_gated = moe.shared_gated.As(weights.shared_down.activation);
  LinearTask shared;
  if (router.has_shared) {
    read_as(weights.shared_gate_up.activation);
    shared = {normed, weights.shared_gate_up, GatedOutput(shared_gated, moe.shared_gated_float),
              moe.shared_gate_up, lora.Layer(context, normed, layer, &LoraLayer::gate_up, w.lora)};
  }
  const LinearTask* const beside = router.has_shared ? &shared : nullptr;
  LinearGatedExperts(context,
                     {gathered, weights.gate_up, GatedOutput(gated, moe.gated_float), moe.gate_up},
                     router, moe.routing, beside, weights.activation);
  if (gated.dtype == DType::kInt8) Quantize(context, moe.gated_float, gated);

  const int64_t pairs = gathered.rows;
  if (router.has_shared) {
    if (shared_gated.dtype == DType::kInt8) {
      Quantize(context, moe.shared_gated_float, shared_gated);
    }
    shared = {shared_gated,
              weights.shared_down,
              RowsOf(moe.outputs, pairs, moe.outputs.rows),
              {},
              lora.Layer(context, shared_gated, layer, &LoraLayer::down, w.lora)};
  }
  LinearExperts(context, {gated, weights.down, RowsOf(moe.outputs, 0, pairs)}, router, moe.routing,
                beside);
  const ResidualOut out = ResidualOutput(w);
  CombineExperts(context, moe.outputs, router, moe.routing, out.accumulates, out.y);
  FinishResidual(context, weights.post_norm, shape.residual_scaling, w);
}

}  // namespace allspark
