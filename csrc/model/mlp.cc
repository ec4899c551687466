#include "model/mlp.h"

#include "model/residual.h"
#include "ops/linear.h"

namespace allspark {

void RunMlp(const OpContext& context, const DecoderShape& shape, const LayerWeights& weights,
            const StepInput& step, const Workspace& w) {
  const MlpWeights& mlp = weights.mlp;
  const ConstMatrix read = shape.parallel_residual
                               ? w.mlp_normed.As(mlp.gate_up.input)
                               : ReadResidual(context, weights.mlp_norm, mlp.gate_up.input, w);
  const ConstMatrix normed = InOrder(context, read, mlp.gate_up, w);
  const Matrix gated = w.gated.As(mlp.down.input);
  (shape.gated_mlp ? LinearGated : LinearActivated)(
      context, normed, mlp.gate_up, shape.activation, w.gate_up, gated,
      step.lora->Layer(context, normed, step.layer, &LoraLayer::gate_up, w.lora));
  AddToResidual(context, gated, mlp.down, weights.mlp_post_norm, shape.residual_scaling,
                step.lora->Layer(context, gated, step.layer, &LoraLayer::down, w.lora), w);
}

}  // namespace allspark
