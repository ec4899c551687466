// Extents: blocks of the KV pool that share a range of memory, in which the parts of one layer and
// head are contiguous, block after block. A sequence with contiguous blocks has its keys in long
// runs, which processors read faster than single blocks (in pieces of 4 KiB in random order, a Zen
// 5 core reads 22 GB/s; in runs of 64 KiB, 32; in order, 37). One range for the whole pool would be
// simpler, but the first token would then touch pages of all of it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/int_math.h"

namespace allspark {

// A power of two: blocks of 4 KiB parts make runs of 64 KiB.
inline constexpr int64_t kMostExtentBlocks = 16;

// Blocks per extent in a pool of num_blocks: the largest power of two up to kMostExtentBlocks that
// divides it, so that every extent is whole.
inline int64_t ExtentBlocks(int64_t num_blocks) {
  if (num_blocks == 0) return 1;
  const int64_t factor = int64_t{1} << std::countr_zero(static_cast<uint64_t>(num_blocks));
  return std::min(factor, kMostExtentBlocks);
}

// At least num_blocks and at most a sixteenth more, for the largest extents that allows.
inline int64_t RoundUpToExtents(int64_t num_blocks) {
  int64_t extent = kMostExtentBlocks;
  while (AlignUp(num_blocks, extent) - num_blocks > num_blocks / 16) extent /= 2;
  return AlignUp(num_blocks, extent);
}

}  // namespace allspark
