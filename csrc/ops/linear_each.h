// LinearEach, LinearGatedEach: several products at once, each with its own rows and weight, as the
// experts of a mixture have. One parallel region for all of them: threads share the reading of all
// weights evenly, however few rows and panels each has.
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

// y = x * w^T (+ bias) of each, as by Linear.
void LinearEach(const OpContext& context, std::span<const LinearTask> tasks);
// y = act(gate) * up of each, as by LinearGated.
void LinearGatedEach(const OpContext& context, std::span<const LinearTask> tasks,
                     kernels::Activation activation);

}  // namespace allspark
