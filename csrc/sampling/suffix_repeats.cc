#include "sampling/suffix_repeats.h"

#include <algorithm>

namespace allspark {

// The Z-algorithm (Gusfield, "Algorithms on Strings, Trees, and Sequences", 1997, 1.3), on the text
// read backwards.
void SuffixRepeats::Start(std::span<const int32_t> text) {
  const auto length = static_cast<int64_t>(text.size());
  const auto back = [text](int64_t i) { return text[text.size() - 1 - static_cast<size_t>(i)]; };
  repeats_.clear();
  // The known repeat that reaches furthest is [begin, end), counted from the end of the text.
  int64_t begin = 0, end = 0;
  for (int64_t distance = 1; distance < length; ++distance) {
    int64_t common = 0;
    if (distance < end) common = std::min(end - distance, At(distance - begin));
    while (distance + common < length && back(common) == back(distance + common)) ++common;
    repeats_.push_back(static_cast<int32_t>(common));
    if (distance + common > end) begin = distance, end = distance + common;
  }
}

void SuffixRepeats::Append(std::span<const int32_t> text) {
  if (text.size() < 2) return;
  repeats_.push_back(0);
  const int32_t token = text.back();
  const int32_t* const before = text.data() + text.size() - 2;
  const auto distances = static_cast<int64_t>(repeats_.size());
  for (int64_t i = 0; i < distances; ++i) {
    int32_t& repeat = repeats_[static_cast<size_t>(i)];
    repeat = before[-i] == token ? repeat + 1 : 0;
  }
}

int64_t SuffixRepeats::CountAfter(std::span<const int32_t> text, int64_t begin,
                                  int64_t size) const {
  const auto length = static_cast<int64_t>(text.size());
  if (length - begin < size) return 0;
  int64_t count = 1;  // the last tokens themselves
  for (int64_t distance = 1; distance <= length - begin - size; ++distance) {
    if (text[static_cast<size_t>(length - 1 - distance)] != text.back()) continue;
    count += size == 1 || At(distance) >= size - 1;
  }
  return count;
}

}  // namespace allspark
