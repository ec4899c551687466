#include "model/mlp.h"

#include "ops/gated_act.h"
#include "ops/rms_norm.h"

namespace allspark {

void RunMlp(const OpContext& context, const MlpWeights& weights, const Workspace& w) {
  RmsNorm(context, w.residual, weights.norm.weight, weights.norm.eps, w.normed);
  Linear(context, w.normed, weights.gate_up, /*accumulate=*/false, w.gate_up);
  GatedAct(context, weights.activation, w.gate_up, w.gated);
  Linear(context, w.gated, weights.down, /*accumulate=*/true, w.residual);
}

}  // namespace allspark
