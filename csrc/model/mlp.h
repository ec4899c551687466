// The MLP half of a layer: norm, gate and up, activation, down projection into the residual.
#pragma once

#include "model/decoder_weights.h"
#include "model/workspace.h"

namespace allspark {

// Adds the layer's MLP to w.residual.
void RunMlp(const OpContext& context, const MlpWeights& weights, const Workspace& w);

}  // namespace allspark
