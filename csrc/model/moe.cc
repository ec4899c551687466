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

void RunExperts(const OpContext& context, const DecoderShape& shape, const LayerWeights& weights,
                const StepInput& step, const Workspace& w) {
  const MoeWeights& own = weights.moe;
  const MoeWorkspace& moe = w.moe;
  RouterParams router = shape.router;
  router.bias = own.router_bias;
  const auto lora = [&](const ConstMatrix& x, LoraWeight LoraLayer::*weight) {
    return step.lora->Layer(context, x, step.layer, weight, w.lora);
  };
  // The stream is read anew where the next product wants it in another format.
  ConstMatrix normed = ReadResidual(context, weights.mlp_norm, own.router.input, w);
  const auto read_as = [&](const InputFormat& format) {
    if (normed.format() != format) normed = ReadResidual(context, weights.mlp_norm, format, w);
  };
  Linear(context, normed, own.router, /*accumulate=*/false, moe.logits);
  Route(context, moe.logits, router, moe.routing);

  const Matrix gathered = moe.gathered.As(own.gate_up.input);
  read_as(gathered.format());
  GatherRows(context, normed, moe.routing.tokens, gathered);
  const Matrix gated = moe.gated.As(own.down.input);
  const Matrix shared_gated = moe.shared_gated.As(own.shared_down.input);
  LinearTask shared;
  if (router.has_shared) {
    read_as(own.shared_gate_up.input);
    shared = {normed, own.shared_gate_up, GatedOutput(shared_gated, moe.shared_gated_float),
              moe.shared_gate_up, lora(normed, &LoraLayer::gate_up)};
  }
  const LinearTask* const beside = router.has_shared ? &shared : nullptr;
  LinearGatedExperts(context,
                     {gathered, own.gate_up, GatedOutput(gated, moe.gated_float), moe.gate_up},
                     router, moe.routing, beside, shape.activation);
  if (gated.dtype == DType::kInt8) Quantize(context, moe.gated_float, gated);

  const int64_t pairs = gathered.rows;
  if (router.has_shared) {
    if (shared_gated.dtype == DType::kInt8) {
      Quantize(context, moe.shared_gated_float, shared_gated);
    }
    shared = {shared_gated,
              own.shared_down,
              RowsOf(moe.outputs, pairs, moe.outputs.rows),
              {},
              lora(shared_gated, &LoraLayer::down)};
  }
  LinearExperts(context, {gated, own.down, RowsOf(moe.outputs, 0, pairs)}, router, moe.routing,
                beside);
  const ResidualOut out = ResidualOutput(w);
  CombineExperts(context, moe.outputs, router, moe.routing, out.accumulates, out.y);
  FinishResidual(context, weights.mlp_post_norm, shape.residual_scaling, w);
}

}  // namespace allspark
