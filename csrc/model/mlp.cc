#include "model/mlp.h"

#include "model/residual.h"
#include "ops/linear.h"

namespace allspark {

void RunMlp(const OpContext& context, const DecoderShape& shape, const MlpWeights& weights,
            int64_t layer, LoraBatch& lora, const Workspace& w) {
  const InputFormat input = weights.gate_up.activation;
  const ConstMatrix read = shape.parallel_residual ? w.mlp_normed.As(input)
                                                   : ReadResidual(context, weights.norm, input, w);
  const ConstMatrix normed = InOrder(context, read, weights.gate_up, w);
  const Matrix gated = w.gated.As(weights.down.activation);
  (weights.gated ? LinearGated : LinearActivated)(
      context, normed, weights.gate_up, weights.activation, w.gate_up, gated,
      lora.Layer(context, normed, layer, &LoraLayer::gate_up, w.lora));
  AddToResidual(context, gated, weights.down, weights.post_norm, shape.residual_scaling,
                lora.Layer(context, gated, layer, &LoraLayer::down, w.lora), w);
}

}  // namespace allspark
