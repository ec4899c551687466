// Guesses by prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): the last tokens of a text are
// looked up earlier in it, and what followed them there is guessed to follow again. Plain data of
// one text; one thread calls it, and nothing allocates.
#pragma once

#include <cstdint>
#include <span>

#include "sampling/draft_chance.h"

namespace allspark {

// How far before the text's end the longest of its last n-grams ends that occurs earlier, of at
// most kMostNgram tokens, and the latest such; 0: not even the last token occurs earlier.
inline constexpr int64_t kMostNgram = 4;
int64_t FindRepeat(std::span<const int32_t> tokens);

// Follows a text as it grows. While it repeats itself at the distance that was found, that is kept
// and nothing is searched. What would have been right is seen from the text alone, whether or not
// anybody computed the guesses: a text without repetition pays for few of them.
class PromptLookup {
 public:
  // To be called before guesses. Requires: `tokens` begins with those of the call before.
  void Follow(std::span<const int32_t> tokens);
  bool has_guess() const { return distance_ > 0; }
  // That the next guess is right.
  double chance() const { return chance_.value(); }
  // The token guessed to come `index` tokens after the end of the text, which was followed. Guesses
  // beyond the distance repeat: the text is taken to go round in a circle.
  int32_t Guess(std::span<const int32_t> tokens, int64_t index) const {
    return tokens[tokens.size() - static_cast<size_t>(distance_ - index % distance_)];
  }

 private:
  int64_t length_ = 0;    // of the text when it was followed
  int64_t distance_ = 0;  // 0: no guess
  // Up to 2/5 the weight makes next to no difference to natural text or to cycles.
  DraftChance chance_{0.125};
};

}  // namespace allspark
