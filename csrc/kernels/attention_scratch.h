// Sizes of the scratch memory of one attention call, in floats; the CPU kernels and their callers
// share them. Every region is a multiple of 64 bytes. The kernel aligns the start to 64 bytes, so
// the caller's pointer need not be aligned.
#pragma once

#include <cstdint>

#include "kernels/args.h"

namespace allspark::kernels {

// Query rows, one per (token, query head), that read the KV cache together: enough to make each
// read cheap, few enough that their scores stay in the second-level cache.
inline constexpr int64_t kAttentionRows = 64;

// Key positions that all query rows process in one go, so that their keys, and then their values,
// stay in the first-level cache.
inline constexpr int64_t kAttentionSpan = 128;

// Padding of a head to whole vectors: at most 15 floats more per row.
inline constexpr int64_t kAttentionDimPadding = 16;

static AS_ALWAYS_INLINE int64_t AttentionDim(int64_t head_dim) {
  return (head_dim + kAttentionDimPadding - 1) / kAttentionDimPadding * kAttentionDimPadding;
}

// Of the partial result of one chunk and one query head: the weighted sum, then the maximum and the
// denominator in a cache line of their own.
static AS_ALWAYS_INLINE int64_t AttentionPartialFloats(int64_t head_dim) {
  return AttentionDim(head_dim) + 16;
}

// Per row: the query, the running sum and one chunk's sum. A quantised cache also needs a span's
// elements in two bytes each.
inline constexpr int64_t kAttentionScratchPerDim = 3 * kAttentionRows + kAttentionSpan / 2;
// Per row: the running maximum and denominator, and one chunk's maximum, denominator and scores. A
// quantised cache also needs the scales of each row's query and weights, a chunk's scales of keys
// and of values, and one vector beyond the elements. 16 floats align the start.
inline constexpr int64_t kAttentionScratchBase =
    (6 + kAttentionChunk) * kAttentionRows + 2 * kAttentionChunk + 16 + 16;

// Of all scratch memory that one call needs, in any table.
static AS_ALWAYS_INLINE int64_t AttentionScratchFloats(int64_t head_dim) {
  return kAttentionScratchBase + kAttentionScratchPerDim * AttentionDim(head_dim);
}

}  // namespace allspark::kernels
