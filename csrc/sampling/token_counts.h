// The distinct tokens of one sequence, each with the number of times it is in the output: what
// penalties look at. Memory is for the longest sequence and independent of the vocabulary's size;
// after construction nothing allocates. Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace allspark {

class TokenCounts {
 public:
  struct Entry {
    int32_t token;
    int32_t num_output;  // 0: in the prompt alone
  };

  // Holds nothing and takes no memory.
  TokenCounts() = default;
  explicit TokenCounts(int64_t max_distinct);

  // Requires: token >= 0; at most max_distinct distinct ones in all.
  void Add(int32_t token, bool is_output);
  // In order of first appearance.
  std::span<const Entry> entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
  std::vector<int32_t> slots_;  // open addressing: 1 + index into entries_, 0 where empty
};

}  // namespace allspark
