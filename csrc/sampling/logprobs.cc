#include "sampling/logprobs.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace allspark {
namespace {

// log-softmax of a row, one logit at a time.
class Normalizer {
 public:
  Normalizer(const kernels::KernelTable& kernels, const float* logits, int64_t vocab_size) {
    double sum = 0;
    kernels.sum_exp({.x = logits,
                     .ldx = vocab_size,
                     .rows = 1,
                     .cols = vocab_size,
                     .highest = &highest_,
                     .sum = &sum});
    log_sum_ = std::log(sum);
  }

  bool has_any() const { return highest_ > -std::numeric_limits<float>::infinity(); }
  // A NaN has no probability, and in a row without a number no logit has.
  float Logprob(float logit) const {
    if (!has_any() || std::isnan(logit)) return -std::numeric_limits<float>::infinity();
    return static_cast<float>(Relative(logit) - log_sum_);
  }

 private:
  // Against the highest; the difference of equal infinities is 0 too.
  double Relative(float logit) const { return logit == highest_ ? 0.0 : double{logit} - highest_; }

  float highest_ = 0;
  double log_sum_ = 0;
};

}  // namespace

// By insertion: few are asked for, and nearly all tokens fail the first comparison.
size_t FindTop(const float* values, int64_t vocab_size, std::vector<TokenLogprob>& top) {
  if (top.empty()) return 0;
  size_t count = 0;
  for (int64_t i = 0; i < vocab_size; ++i) {
    const float floor =
        count < top.size() ? -std::numeric_limits<float>::infinity() : top.back().logprob;
    if (!(values[i] > floor)) continue;  // NaN too.
    size_t place = count < top.size() ? count++ : count - 1;
    for (; place > 0 && top[place - 1].logprob < values[i]; --place) top[place] = top[place - 1];
    top[place] = {static_cast<int32_t>(i), values[i]};
  }
  std::fill(top.begin() + static_cast<int64_t>(count), top.end(), TokenLogprob{});
  return count;
}

void LogSoftmax(const kernels::KernelTable& kernels, float* logits, int64_t vocab_size) {
  const Normalizer normalizer(kernels, logits, vocab_size);
  if (!normalizer.has_any()) return;
  for (int64_t i = 0; i < vocab_size; ++i) logits[i] = normalizer.Logprob(logits[i]);
}

void ComputeLogprobs(const kernels::KernelTable& kernels, const float* logits, int64_t vocab_size,
                     int32_t token, RowLogprobs& result) {
  const Normalizer normalizer(kernels, logits, vocab_size);
  result.chosen = normalizer.Logprob(logits[token]);
  if (result.top.empty()) return;
  const size_t count = FindTop(logits, vocab_size, result.top);
  for (size_t i = 0; i < count; ++i) {
    result.top[i].logprob = normalizer.Logprob(result.top[i].logprob);
  }
}

}  // namespace allspark
