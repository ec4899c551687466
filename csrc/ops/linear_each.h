// LinearEach: several products at once, each with its own rows and weight. A device computes all in
// one go, so that the reading of the weights is shared evenly even if each product has few rows and
// panels.
#pragma once

#include <span>

#include "ops/linear.h"

namespace allspark {

struct LinearTask {
  ConstMatrix x;  // [rows, w.k]; with no rows, the weight is not read
  LinearWeight w;
  Matrix y;             // [rows, w.n] float32
  Matrix scratch = {};  // of products with an activation (experts.h)
  std::span<const kernels::LowRank> low_rank = {};
};

// y = x * w^T (+ bias) for each task, as Linear does.
void LinearEach(const OpContext& context, std::span<const LinearTask> tasks);

}  // namespace allspark
