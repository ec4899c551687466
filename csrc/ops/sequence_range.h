// One sequence's tokens of a step, as the cache ops see them.
#pragma once

#include <cstdint>
#include <span>

namespace allspark {

struct SequenceRange {
  int64_t token_begin = 0;  // row of the first token in the step's matrices
  int64_t num_tokens = 0;
  int64_t position = 0;                  // position of the first token
  const int32_t* block_table = nullptr;  // block ids by position / block_size; on the device
};

// The sequences of a step, where the host plans with them and where the device reads them.
struct SequenceRanges {
  std::span<const SequenceRange> host;
  const SequenceRange* device = nullptr;
};

}  // namespace allspark
