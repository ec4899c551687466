// Rope frequencies for sequences longer than a model was trained for.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "allspark/status.h"

namespace allspark {

// The frequencies of dynamic NTK scaling (transformers' rope type "dynamic") at `max_length`
// tokens: the base grows by
//   (factor * max_length / trained_length - (factor - 1)) ^ (n / (n - 2)),  n = rotary dimensions,
// and they stay the same for every sequence: what a token sees must not depend on how many follow.
// Up to trained_length they are those given. InvalidArgument unless inv_freq[i] = base^(-2i / n),
// naming rope_scaling_factor.
Result<std::vector<float>> ExtendFrequencies(std::span<const float> inv_freq, double factor,
                                             int64_t max_length, int64_t trained_length);

}  // namespace allspark
