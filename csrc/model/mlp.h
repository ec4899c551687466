// The MLP half of a layer: norm, gate and up, activation, down projection into the residual.
#pragma once

#include "model/decoder_weights.h"
#include "model/step_input.h"
#include "model/workspace.h"

namespace allspark {

// Adds the layer's MLP to w.residual; with shape.parallel_residual it reads w.mlp_normed, which the
// caller has filled.
void RunMlp(const OpContext& context, const DecoderShape& shape, const LayerWeights& weights,
            const StepInput& step, const Workspace& w);

}  // namespace allspark
