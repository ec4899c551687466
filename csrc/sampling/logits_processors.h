// What a request asks for in its rows of logits before a token is chosen: biases, penalties and
// bans that depend on the tokens so far (sampling/logit_edits.h). The order, that of transformers'
// logits processors where it has one:
//   logit_bias, repetition_penalty, frequency_penalty and presence_penalty, no_repeat_ngram_size,
//   bad_words.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "allspark/word_matcher.h"

namespace allspark {

struct LogitsProcessors {
  // Added to the logits of these tokens.
  std::vector<std::pair<int32_t, float>> logit_bias = {};
  // Divides positive logits and multiplies negative ones of tokens in the prompt or the output.
  float repetition_penalty = 1;
  bool repetition_in_output_only = false;
  // Subtracted for each occurrence in the output, and once if there is any.
  float frequency_penalty = 0;
  float presence_penalty = 0;
  // Bans tokens that would repeat an n-gram of prompt and output; 0: off.
  int64_t no_repeat_ngram_size = 0;
  // Bans tokens that would complete one of these words; null: none.
  std::shared_ptr<const WordMatcher> bad_words = nullptr;

  bool NeedsCounts() const {
    return repetition_penalty != 1 || frequency_penalty != 0 || presence_penalty != 0;
  }
  // False: there are no edits.
  bool Any() const {
    return NeedsCounts() || !logit_bias.empty() || no_repeat_ngram_size > 0 || bad_words != nullptr;
  }
};

}  // namespace allspark
