// LinearExperts, LinearGatedExperts: one product of all experts of a layer. Each expert multiplies
// the rows of the pairs that are routed to it (ops/moe.h); how many these are only the device
// knows. A device computes all in one go, the shared expert's product included, so that the reading
// of the weights is shared evenly even if each expert has few rows.
#pragma once

#include "ops/linear_each.h"
#include "ops/moe.h"

namespace allspark {

struct ExpertsTask {
  ConstMatrix x;   // [pairs, w.k], in the order of Routing
  LinearWeight w;  // of all experts, one after the other (WeightOf)
  // [pairs, n] float32, where n is w.n / experts; of LinearGatedExperts [pairs, n / 2] float32 or
  // bfloat16.
  Matrix y;
  Matrix scratch = {};  // LinearGatedExperts only: [pairs, n] float32
};

// y = x * (the row's expert)^T, as Linear does. `shared` (null: none) is computed beside.
void LinearExperts(const OpContext& context, const ExpertsTask& task, const RouterParams& router,
                   const Routing& routing, const LinearTask* shared);
// y = act(gate) * up, as LinearGated does.
void LinearGatedExperts(const OpContext& context, const ExpertsTask& task,
                        const RouterParams& router, const Routing& routing,
                        const LinearTask* shared, kernels::Activation activation);

}  // namespace allspark
