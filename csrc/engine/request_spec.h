// What a request asks for, checked against the limits of its model. Constant from StartRequest on.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "allspark/config.h"
#include "allspark/status.h"
#include "allspark/word_matcher.h"
#include "sampling/logits_processors.h"
#include "sampling/sampler.h"
#include "sampling/suffix_repeats.h"

namespace allspark {

// The limits that a request is checked against.
struct RequestLimits {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t engine_max_length = 0;
  int64_t engine_max_batch = 1;
  int64_t block_size = 0;
  int64_t num_draft_tokens = 0;  // of the model's draft model; 0: it has none
};

inline constexpr int64_t kNoDeadline = std::numeric_limits<int64_t>::max();

// What ends an output before its length does.
struct EndConditions {
  std::vector<int32_t> tokens;               // EOS, stop tokens, stop words of one token; in order
  std::shared_ptr<const WordMatcher> words;  // longer stop words; null: none
  int64_t num_word_endings = 0;              // distinct last tokens of `words` not among `tokens`
  int64_t ngram_size = 0;                    // of the n-grams whose repetition is a loop; 0: off
  int64_t ngram_threshold = 0;

  bool EndsWith(int32_t token) const;
  // Whether the last n-gram of the output, which is `text` from output_begin on, occurs in it often
  // enough to call it a loop. `repeats` follows the text but for its last token.
  bool IsLoop(std::span<const int32_t> text, int64_t output_begin,
              const SuffixRepeats& repeats) const;
};

// Log-probabilities of output tokens.
struct LogprobsSpec {
  bool wanted = false;
  int64_t num_top = 0;
  bool raw = false;  // of the model's own logits, before any processing
};

struct RequestSpec {
  // Checks prompt and config; the message names the field, the value and the bound. has_mask: a
  // token mask comes with the request.
  static Result<RequestSpec> Create(uint64_t request_id, std::span<const int64_t> prompt_ids,
                                    const GenerationConfig& config, const RequestLimits& limits,
                                    bool has_mask);
  // Of the member of a group whose first member this is, with the id and seed that follow.
  RequestSpec ForMember(int64_t index) const;

  // Whether fields look at the text's n-grams.
  bool NeedsRepeats() const { return processors.no_repeat_ngram_size > 0 || ends.ngram_size > 0; }
  // Whether the log-probability of the token after `position` is wanted: both are of the prompt.
  bool IsScored(int64_t position) const {
    return scores_prompt && position >= scored_begin && position < prompt_length - 1;
  }

  uint64_t request_id = 0;
  int64_t priority = 0;
  int64_t deadline_us = kNoDeadline;
  int64_t prompt_length = 0;
  int64_t output_begin = 0;  // at most prompt_length: a prompt may end with earlier output
  int64_t min_length = 0;    // of prompt + output, as max_length is
  int64_t max_length = 0;
  EndConditions ends;
  SamplingParams sampling;
  bool is_seeded = false;  // by the caller
  LogitsProcessors processors;
  LogprobsSpec logprobs;
  bool prompt_only = false;
  bool scores_prompt = false;
  int64_t scored_begin = 0;    // the position before the first token that is scored
  int64_t most_looked_up = 0;  // drafts of one step by prompt lookup; 0: not asked for
  bool uses_draft_model = false;
};

// Checks that every id is in the vocabulary.
Status CheckTokenIds(std::span<const int64_t> ids, int64_t vocab_size);

}  // namespace allspark
