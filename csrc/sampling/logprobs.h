// Log-probabilities of one row of logits: log-softmax over the whole vocabulary. Pure functions;
// any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernel_table.h"

namespace allspark {

struct TokenLogprob {
  int32_t token = -1;  // -1: no token left
  float logprob = 0;
};

// What a row asks for, and what it gets.
struct RowLogprobs {
  bool raw = false;  // of the model's own logits; else as the choice saw them, before temperature
  // As many of the likeliest as it has elements, in order of (logit descending, id ascending);
  // where fewer tokens have any probability, the rest have token -1.
  std::vector<TokenLogprob> top;
  float chosen = 0;  // of the chosen token
};

// logits: [vocab_size]. NaN counts as -inf; +inf logits share all probability. Requires: some logit
// is above -inf. A token without probability has logprob -inf.
void ComputeLogprobs(const kernels::KernelTable& kernels, const float* logits, int64_t vocab_size,
                     int32_t token, RowLogprobs& result);

}  // namespace allspark
