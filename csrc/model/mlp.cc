#include "model/mlp.h"

#include "ops/linear.h"
#include "ops/rms_norm.h"

namespace allspark {

void RunMlp(const OpContext& context, const MlpWeights& weights, const Workspace& w) {
  const Matrix normed = w.normed.As(weights.gate_up.activation);
  RmsNorm(context, w.residual, weights.norm.weight, weights.norm.eps, normed);
  const Matrix gated = w.gated.As(weights.down.activation);
  LinearGated(context, normed, weights.gate_up, weights.activation, w.gate_up, gated);
  Linear(context, gated, weights.down, /*accumulate=*/true, w.residual);
}

}  // namespace allspark
