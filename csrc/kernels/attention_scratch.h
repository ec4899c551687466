// How the scratch memory of one attention call is laid out: sizes only, shared by the CPU kernels
// and by AttentionScratchFloats. In floats; every region is a multiple of 64 bytes, and the begin
// is aligned to 64 bytes by the kernel itself, so the caller's pointer need not be.
#pragma once

#include <cstdint>

#include "kernels/args.h"

namespace allspark::kernels {

// Query rows, one per (token, query head), that pass over the cache together: as many as make
// reading it cheap, few enough that their scores stay in the second-level cache.
inline constexpr int64_t kAttentionRows = 64;

// Positions whose keys, and then values, all of them pass over while these are in the first-level
// cache.
inline constexpr int64_t kAttentionSpan = 128;

// Padding of a head to whole vectors: at most 15 floats more per row.
inline constexpr int64_t kAttentionDimPadding = 16;

AS_ALWAYS_INLINE int64_t AttentionDim(int64_t head_dim) {
  return (head_dim + kAttentionDimPadding - 1) / kAttentionDimPadding * kAttentionDimPadding;
}

// A partial result: the weighted sum, then the maximum and the denominator in a cache line of their
// own.
AS_ALWAYS_INLINE int64_t PartialFloats(int64_t head_dim) { return AttentionDim(head_dim) + 16; }

// Per row: the query, the running sum and one chunk's sum; of a quantised cache, a span's elements
// in two bytes each.
inline constexpr int64_t kAttentionScratchPerDim = 3 * kAttentionRows + kAttentionSpan / 2;
// Running and one chunk's maximum and denominator per row, one chunk's scores per row; of a
// quantised cache, scales of each row's query and weights, a chunk's scales of keys and of values,
// and a vector beyond the elements; 16 for aligning the begin.
inline constexpr int64_t kAttentionScratchBase =
    (6 + kAttentionChunk) * kAttentionRows + 2 * kAttentionChunk + 16 + 16;

}  // namespace allspark::kernels
