#include "model/mlp.h"

#include "ops/gated_act.h"
#include "ops/rms_norm.h"

namespace allspark {

void RunMlp(const OpContext& context, const MlpWeights& weights, const Workspace& w) {
  const Matrix normed = w.normed.As(weights.gate_up.activation);
  RmsNorm(context, w.residual, weights.norm.weight, weights.norm.eps, normed);
  Linear(context, normed, weights.gate_up, /*accumulate=*/false, w.gate_up);
  const Matrix gated = w.gated.As(weights.down.activation);
  GatedAct(context, weights.activation, w.gate_up, gated);
  Linear(context, gated, weights.down, /*accumulate=*/true, w.residual);
}

}  // namespace allspark
