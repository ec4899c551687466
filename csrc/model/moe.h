// The MLP half of a layer with experts: norm, routing, the experts' MLPs, their sum into the
// residual.
#pragma once

#include <cstddef>
#include <vector>

#include "model/decoder_weights.h"
#include "model/lora.h"
#include "model/workspace.h"
#include "ops/linear_each.h"

namespace allspark {

// Most products that RunExperts puts into `tasks` at a time.
size_t MaxExpertTasks(const DecoderShape& shape);

// Adds the layer's experts to w.residual. `tasks` has room for MaxExpertTasks.
void RunExperts(const OpContext& context, const DecoderShape& shape, const MoeWeights& weights,
                int64_t layer, LoraBatch& lora, const Workspace& w, std::vector<LinearTask>& tasks);

}  // namespace allspark
