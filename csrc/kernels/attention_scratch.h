// How the scratch memory of one attention call is laid out: sizes only, shared by the CPU kernels
// and by AttentionScratchFloats. In floats; every region is a multiple of 64 bytes, and the begin
// is aligned to 64 bytes by the kernel itself, so the caller's pointer need not be.
#pragma once

#include <cstdint>

#include "kernels/args.h"

namespace allspark::kernels {

// Query rows, one per (token, query head), that pass over the cache together. A multiple of every
// kernel's register tile.
inline constexpr int64_t kAttentionRows = 24;
// Most rows in one register tile.
inline constexpr int64_t kAttentionTileRows = 8;

// Padding of a head to whole vectors: at most 15 floats more per row.
inline constexpr int64_t kAttentionDimPadding = 16;

// Per row: the query and the running sum, and per tile row one chunk's sum.
inline constexpr int64_t kAttentionScratchPerDim = 2 * kAttentionRows + kAttentionTileRows;
// The padding of those, running maximum and denominator per row, the scores of one chunk per tile
// row, and 16 for aligning the begin.
inline constexpr int64_t kAttentionScratchBase = kAttentionScratchPerDim * kAttentionDimPadding +
                                                 2 * 32 + kAttentionTileRows * kAttentionChunk + 16;

}  // namespace allspark::kernels
