#include "sampling/logits_processors.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace allspark {
namespace {

constexpr float kBanned = -std::numeric_limits<float>::infinity();

float& LogitOf(std::span<float> logits, int32_t token) {
  AS_CHECK(token >= 0 && static_cast<size_t>(token) < logits.size())
      << "token id is " << token << ", outside [0, " << logits.size() << ")";
  return logits[static_cast<size_t>(token)];
}

void Penalize(const LogitsProcessors& p, const TokenCounts& counts, std::span<float> logits) {
  for (const TokenCounts::Entry& entry : counts.entries()) {
    float& logit = LogitOf(logits, entry.token);
    if (p.repetition_penalty != 1 && !(p.repetition_in_output_only && entry.num_output == 0)) {
      logit = logit < 0 ? logit * p.repetition_penalty : logit / p.repetition_penalty;
    }
    if (entry.num_output > 0) {
      logit -= p.frequency_penalty * static_cast<float>(entry.num_output);
      logit -= p.presence_penalty;
    }
  }
}

// Masks the tokens that followed earlier occurrences of the last size - 1 tokens.
void BanRepeatedNgrams(std::span<const int32_t> tokens, int64_t size, std::span<float> logits) {
  const auto context_size = static_cast<size_t>(size - 1);
  if (tokens.size() < context_size) return;
  const std::span<const int32_t> context = tokens.last(context_size);
  for (size_t i = 0; i + context_size < tokens.size(); ++i) {
    if (std::equal(context.begin(), context.end(), tokens.begin() + static_cast<int64_t>(i))) {
      LogitOf(logits, tokens[i + context_size]) = kBanned;
    }
  }
}

}  // namespace

void LogitsProcessors::Apply(std::span<const int32_t> tokens, const TokenCounts* counts,
                             int32_t bad_word_state, std::span<float> logits) const {
  for (const auto& [token, bias] : logit_bias) LogitOf(logits, token) += bias;
  if (NeedsCounts()) Penalize(*this, *counts, logits);
  if (no_repeat_ngram_size > 0) BanRepeatedNgrams(tokens, no_repeat_ngram_size, logits);
  if (bad_words != nullptr) {
    bad_words->ForEachCompletion(bad_word_state,
                                 [&](int32_t token) { LogitOf(logits, token) = kBanned; });
  }
}

}  // namespace allspark
