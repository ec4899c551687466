// The MLP half of a layer with experts: norm, routing, the experts' MLPs, their sum into the
// residual.
#pragma once

#include "model/decoder_weights.h"
#include "model/step_input.h"
#include "model/workspace.h"

namespace allspark {

// Adds the layer's experts to w.residual.
void RunExperts(const OpContext& context, const DecoderShape& shape, const LayerWeights& weights,
                const StepInput& step, const Workspace& w);

}  // namespace allspark
