// LinearEach, LinearGatedEach: several products at once, each with its own rows and weight, for the
// experts of a mixture. A device computes all in one go, so that the reading of the weights is
// shared evenly even if each product has few rows and panels.
#pragma once

#include <span>

#include "ops/linear.h"

namespace allspark {

struct LinearTask {
  ConstMatrix x;  // [rows, w.k]; with no rows, the weight is not read
  LinearWeight w;
  Matrix y;        // [rows, w.n] float32; of LinearGatedEach [rows, w.n / 2] float32 or bfloat16
  Matrix scratch;  // LinearGatedEach only: [rows, w.n] float32
  std::span<const kernels::LowRank> low_rank = {};
};

// y = x * w^T (+ bias) for each task, as Linear does.
void LinearEach(const OpContext& context, std::span<const LinearTask> tasks);
// y = act(gate) * up for each task, as LinearGated does.
void LinearGatedEach(const OpContext& context, std::span<const LinearTask> tasks,
                     kernels::Activation activation);

}  // namespace allspark
