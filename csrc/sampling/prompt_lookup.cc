#include "sampling/prompt_lookup.h"

#include <algorithm>

namespace allspark {

std::span<const int32_t> LookUpDraft(std::span<const int32_t> tokens, int64_t most) {
  const auto length = static_cast<int64_t>(tokens.size());
  int64_t best = kLeastNgram - 1, best_end = 0;
  // `end` is where an earlier occurrence ends; the latest first.
  for (int64_t end = length - 1; end >= kLeastNgram && best < kMostNgram; --end) {
    int64_t common = 0;
    while (common < std::min(kMostNgram, end) &&
           tokens[static_cast<size_t>(end - 1 - common)] ==
               tokens[static_cast<size_t>(length - 1 - common)]) {
      ++common;
    }
    if (common > best) best = common, best_end = end;
  }
  if (best_end == 0) return {};
  return tokens.subspan(static_cast<size_t>(best_end),
                        static_cast<size_t>(std::min(most, length - best_end)));
}

int64_t DraftLength::Next() {
  if (pause_ > 0) {
    --pause_;
    return 0;
  }
  return next_;
}

void DraftLength::Verified(int64_t drafted, int64_t accepted) {
  if (accepted == 0) {
    pause_ = next_pause_;
    next_pause_ = std::min(2 * next_pause_, kMostPause);
    next_ = std::min(most_, kFirst);
    return;
  }
  next_pause_ = 1;
  next_ = std::min(most_, accepted == drafted ? 2 * std::max(next_, drafted) : accepted + 1);
}

}  // namespace allspark
