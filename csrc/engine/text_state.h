// What is known of the text of one sequence: its tokens and what follows them. The step thread's;
// after Reserve nothing allocates as the text grows, nor if one state is copied to another of the
// same spec.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "allspark/word_matcher.h"
#include "engine/request_spec.h"
#include "sampling/logprobs.h"
#include "sampling/suffix_repeats.h"
#include "sampling/token_counts.h"

namespace allspark {

// The states of a sequence's word matchers: a bad word may begin in the prompt, a stop word begins
// in the output.
struct WordStates {
  int32_t bad = WordMatcher::kStart;
  int32_t stop = WordMatcher::kStart;
};

struct TextState {
  // Room for all but output_logprobs, which only members of a group have.
  void Reserve(const RequestSpec& spec, int64_t vocab_size) {
    tokens.reserve(static_cast<size_t>(spec.max_length));
    if (spec.processors.NeedsCounts()) {
      counts = TokenCounts(std::min(spec.max_length, vocab_size));
    }
    if (spec.NeedsRepeats()) repeats = SuffixRepeats(spec.max_length);
  }

  std::vector<int32_t> tokens;     // prompt, then generated
  TokenCounts counts;              // of `tokens`, where the processors need them
  SuffixRepeats repeats;           // of `tokens`, where the spec needs them
  WordStates words;                // after `tokens`
  OutputLogprobs output_logprobs;  // of a member of a group, where wanted
};

}  // namespace allspark
