// SuffixRepeats: where the last tokens of a text stand earlier in it. For each distance it knows
// how many of the last tokens equal those that far before them, so that n-grams of any size are
// found without a comparison of tokens. After construction nothing allocates. Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace allspark {

class SuffixRepeats {
 public:
  // Follows no text and takes no memory.
  SuffixRepeats() = default;
  // 4 bytes x max_length.
  explicit SuffixRepeats(int64_t max_length) { repeats_.reserve(static_cast<size_t>(max_length)); }

  // Follows this text from now on, in time linear in its length.
  void Start(std::span<const int32_t> text);
  // The text has grown by its last token; linear as well.
  void Append(std::span<const int32_t> text);

  // Calls visit(token) for each token of the followed text that comes after an earlier occurrence
  // of its last `size` tokens, in the order of the text. Requires: size >= 0.
  template <typename Visit>
  void ForEachFollower(std::span<const int32_t> text, int64_t size, Visit&& visit) const {
    const auto length = static_cast<int64_t>(text.size());
    for (int64_t distance = length - size; distance > 0; --distance) {
      if (size == 0 || At(distance) >= size) visit(text[static_cast<size_t>(length - distance)]);
    }
  }
  // How often the last `size` tokens of a text occur in its part from `begin` on. `text` is the
  // followed one and one token more. Requires: size >= 1.
  int64_t CountAfter(std::span<const int32_t> text, int64_t begin, int64_t size) const;

 private:
  // Requires: 1 <= distance < the length of the text.
  int64_t At(int64_t distance) const { return repeats_[static_cast<size_t>(distance - 1)]; }

  std::vector<int32_t> repeats_;  // by distance, from 1 on
};

}  // namespace allspark
