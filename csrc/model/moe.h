// The MLP half of a layer with experts: norm, routing, the experts' MLPs, their sum into the
// residual.
#pragma once

#include "model/decoder_weights.h"
#include "model/lora.h"
#include "model/workspace.h"

namespace allspark {

// Adds the layer's experts to w.residual.
void RunExperts(const OpContext& context, const DecoderShape& shape, const MoeWeights& weights,
                int64_t layer, LoraBatch& lora, const Workspace& w);

}  // namespace allspark
