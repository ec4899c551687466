// LogitEdit: a change of one logit of a row before its token is chosen. RowEdits: those of one row.
// They follow from the tokens so far and never from logits, so the host can list them while the
// device computes. Any thread.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "sampling/logits_processors.h"
#include "sampling/suffix_repeats.h"
#include "sampling/token_counts.h"

namespace allspark {

struct LogitEdit {
  enum class Kind : uint8_t {
    kAdd,       // adds `value`
    kPenalize,  // divides by `value`; multiplies a negative logit with it
    kBan,       // -inf
  };

  float Of(float logit) const {
    switch (kind) {
      case Kind::kAdd:
        return logit + value;
      case Kind::kPenalize:
        return logit < 0 ? logit * value : logit / value;
      case Kind::kBan:
        break;
    }
    return -std::numeric_limits<float>::infinity();
  }

  int32_t token = -1;
  Kind kind = Kind::kBan;
  float value = 0;
};

struct RowEdits {
  // Calls visit(edit) in the order in which the edits are applied: those of the processors, then
  // bans. A token may have several.
  template <typename Visit>
  void ForEach(Visit&& visit) const;

  const LogitsProcessors* processors = nullptr;  // null: none
  // What the processors look at: prompt and output so far, counts of the same (needed where
  // NeedsCounts()), their repeats (needed with no_repeat_ngram_size), and the state of bad_words
  // after them.
  std::span<const int32_t> tokens = {};
  const TokenCounts* counts = nullptr;
  const SuffixRepeats* repeats = nullptr;
  int32_t bad_word_state = WordMatcher::kStart;
  // Tokens that may not be chosen now (EOS before min_length).
  std::span<const int32_t> banned = {};

 private:
  template <typename Visit>
  void Penalties(Visit& visit) const;
};

template <typename Visit>
void RowEdits::ForEach(Visit&& visit) const {
  const auto ban = [&](int32_t token) { visit(LogitEdit{.token = token}); };
  if (processors != nullptr) {
    for (const auto& [token, bias] : processors->logit_bias) {
      visit(LogitEdit{token, LogitEdit::Kind::kAdd, bias});
    }
    if (processors->NeedsCounts()) Penalties(visit);
    if (processors->no_repeat_ngram_size > 0) {
      repeats->ForEachFollower(tokens, processors->no_repeat_ngram_size - 1, ban);
    }
    if (processors->bad_words != nullptr) {
      processors->bad_words->ForEachCompletion(bad_word_state, ban);
    }
  }
  for (const int32_t token : banned) ban(token);
}

template <typename Visit>
void RowEdits::Penalties(Visit& visit) const {
  using Kind = LogitEdit::Kind;
  const LogitsProcessors& p = *processors;
  for (const TokenCounts::Entry& entry : counts->entries()) {
    if (p.repetition_penalty != 1 && !(p.repetition_in_output_only && entry.num_output == 0)) {
      visit(LogitEdit{entry.token, Kind::kPenalize, p.repetition_penalty});
    }
    if (entry.num_output > 0) {
      const auto count = static_cast<float>(entry.num_output);
      visit(LogitEdit{entry.token, Kind::kAdd, -(p.frequency_penalty * count)});
      visit(LogitEdit{entry.token, Kind::kAdd, -p.presence_penalty});
    }
  }
}

}  // namespace allspark
