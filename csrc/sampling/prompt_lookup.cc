#include "sampling/prompt_lookup.h"

#include <algorithm>

namespace allspark {

int64_t FindRepeat(std::span<const int32_t> tokens) {
  const auto length = static_cast<int64_t>(tokens.size());
  int64_t best = 0, best_end = length;
  // `end` is where an earlier occurrence ends; the latest first.
  for (int64_t end = length - 1; end > 0 && best < kMostNgram; --end) {
    int64_t common = 0;
    while (common < std::min(kMostNgram, end) &&
           tokens[static_cast<size_t>(end - 1 - common)] ==
               tokens[static_cast<size_t>(length - 1 - common)]) {
      ++common;
    }
    if (common > best) best = common, best_end = end;
  }
  return length - best_end;
}

void PromptLookup::Follow(std::span<const int32_t> tokens) {
  const auto length = static_cast<int64_t>(tokens.size());
  for (; distance_ > 0 && length_ < length; ++length_) {
    const bool right =
        tokens[static_cast<size_t>(length_)] == tokens[static_cast<size_t>(length_ - distance_)];
    acceptance_rate_.Seen(right);
    if (!right) distance_ = 0;
  }
  length_ = length;
  if (distance_ == 0) distance_ = FindRepeat(tokens);
}

}  // namespace allspark
