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
// and the frequencies are the same for every sequence: a token must not depend on how many tokens
// follow it. Up to trained_length they are unchanged. InvalidArgument, naming rope_scaling_factor,
// unless inv_freq[i] = base^(-2i / n).
Result<std::vector<float>> ExtendFrequencies(std::span<const float> inv_freq, double factor,
                                             int64_t max_length, int64_t trained_length);

}  // namespace allspark
