#include "sampling/logprobs.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace allspark {
namespace {

// The likeliest tokens by insertion: few are asked for, and nearly all tokens fail the first
// comparison. Returns how many there are.
size_t FindTop(const float* logits, int64_t vocab_size, std::vector<TokenLogprob>& top) {
  size_t count = 0;
  for (int64_t i = 0; i < vocab_size; ++i) {
    const float floor =
        count < top.size() ? -std::numeric_limits<float>::infinity() : top.back().logprob;
    if (!(logits[i] > floor)) continue;  // NaN too.
    size_t place = count < top.size() ? count++ : count - 1;
    for (; place > 0 && top[place - 1].logprob < logits[i]; --place) top[place] = top[place - 1];
    top[place] = {static_cast<int32_t>(i), logits[i]};
  }
  return count;
}

}  // namespace

void ComputeLogprobs(const kernels::KernelTable& kernels, const float* logits, int64_t vocab_size,
                     int32_t token, RowLogprobs& result) {
  float highest = 0;
  double sum = 0;
  kernels.sum_exp({.x = logits,
                   .ldx = vocab_size,
                   .rows = 1,
                   .cols = vocab_size,
                   .highest = &highest,
                   .sum = &sum},
                  nullptr);
  // Against the highest; the difference of equal infinities is 0 too.
  const auto relative = [highest](float logit) {
    return logit == highest ? 0.0 : double{logit} - highest;
  };
  const double log_sum = std::log(sum);
  const auto logprob = [&](float logit) { return static_cast<float>(relative(logit) - log_sum); };
  result.chosen = logprob(logits[token]);
  if (result.top.empty()) return;
  const size_t count = FindTop(logits, vocab_size, result.top);
  for (size_t i = 0; i < count; ++i) result.top[i].logprob = logprob(result.top[i].logprob);
  std::fill(result.top.begin() + static_cast<int64_t>(count), result.top.end(), TokenLogprob{});
}

}  // namespace allspark
