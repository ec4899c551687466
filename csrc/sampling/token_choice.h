// Draws one token from a row of logits: temperature, then top-k, top-p and min-p, then one
// uniform number through the inverse cumulative distribution. Pure functions over the caller's
// scratch; any thread.
//
// What is kept, in the terms of transformers' logits warpers:
//   - NaN and -inf are never chosen. Where there is a +inf, the +inf tokens share all probability.
//   - top_k keeps every token whose logit is at least the k-th highest: all ties at the edge stay.
//   - top_p keeps the shortest prefix of (logit descending, id ascending) whose probability,
//     after top_k, reaches top_p; at least one token. transformers leaves the order of equal logits
//     open; here the lower id is first.
//   - min_p keeps, of those, every token at least min_p times as probable as the likeliest.
// The uniform number walks the kept tokens in that order. Weights are exp((logit - max) /
// temperature) in double.
#pragma once

#include <cstdint>

namespace allspark {

struct TokenCandidate {
  float logit;
  int32_t id;
};

struct TokenFilter {
  double temperature = 1.0;  // > 0
  int64_t top_k = 0;         // <= 0: all
  double top_p = 1.0;        // >= 1 (or NaN): all
  double min_p = 0.0;        // in [0, 1]
};

// logits: [vocab_size]; scratch: [vocab_size]; 0 <= uniform < 1. Returns the token, -1 where no
// logit is above -inf.
int32_t ChooseToken(const float* logits, int64_t vocab_size, const TokenFilter& filter,
                    double uniform, TokenCandidate* scratch);

}  // namespace allspark
