#include "sampling/token_counts.h"

#include <bit>

#include "base/check.h"

namespace allspark {

TokenCounts::TokenCounts(int64_t max_distinct) {
  AS_CHECK(max_distinct >= 1) << "max_distinct is " << max_distinct << ", less than 1";
  entries_.reserve(static_cast<size_t>(max_distinct));
  slots_.resize(std::bit_ceil(2 * static_cast<size_t>(max_distinct)));  // at most half full
}

void TokenCounts::Add(int32_t token, bool is_output) {
  const size_t mask = slots_.size() - 1;
  // Fibonacci hashing: neighbouring ids, frequent in real vocabularies, fall far apart.
  size_t slot = (static_cast<uint32_t>(token) * uint64_t{0x9E3779B97F4A7C15} >> 32) & mask;
  while (slots_[slot] != 0 && entries_[static_cast<size_t>(slots_[slot] - 1)].token != token) {
    slot = (slot + 1) & mask;
  }
  if (slots_[slot] == 0) {
    AS_CHECK(entries_.size() < entries_.capacity()) << "more distinct tokens than reserved";
    entries_.push_back({token, 0});
    slots_[slot] = static_cast<int32_t>(entries_.size());
  }
  if (is_output) ++entries_[static_cast<size_t>(slots_[slot] - 1)].num_output;
}

}  // namespace allspark
