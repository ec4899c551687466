// Drafts by prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): the last tokens of a text are
// searched for earlier in it, and the draft tokens are those that followed there. Plain data of one
// text; one thread calls it, and nothing allocates.
#pragma once

#include <cstdint>
#include <span>

#include "sampling/acceptance_rate.h"

namespace allspark {

// The distance from the end of the text to the most recent earlier occurrence of its longest
// repeated last n-gram, of at most kMostNgram tokens. 0: even the last token does not occur
// earlier.
inline constexpr int64_t kMostNgram = 4;
int64_t FindRepeat(std::span<const int32_t> tokens);

// Follows a text as it grows. While the text repeats itself at the distance that was found, the
// distance is kept without a search. The text alone shows which drafts would have been accepted,
// whether or not a step computed them, so a text without repetition pays for few.
class PromptLookup {
 public:
  // To be called before Draft. Requires: `tokens` begins with those of the call before.
  void Follow(std::span<const int32_t> tokens);
  bool has_draft() const { return distance_ > 0; }
  // Probability that the next draft is accepted.
  double acceptance_rate() const { return acceptance_rate_.value(); }
  // The draft token `index` tokens after the end of the followed text. Beyond the distance drafts
  // repeat, as if the text were periodic.
  int32_t Draft(std::span<const int32_t> tokens, int64_t index) const {
    return tokens[tokens.size() - static_cast<size_t>(distance_ - index % distance_)];
  }

 private:
  int64_t length_ = 0;    // of the text when it was followed
  int64_t distance_ = 0;  // 0: no draft
  // Up to 2/5 the weight makes next to no difference to natural text or to cycles.
  AcceptanceRate acceptance_rate_{0.125};
};

}  // namespace allspark
