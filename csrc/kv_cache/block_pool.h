// Block ids and reference counts of the paged KV cache: integers only, no memory, no device. A
// block holds block_size tokens of all layers; a sequence's block table lists its blocks in order
// of position. A block with one reference belongs to one table, which may write it; a block with
// more is shared and read-only. A table's next block is contiguous with its last one if that block
// is free and of the same extent (extent.h). Otherwise it is taken from the extent with the most
// free blocks, so that tables have room to grow. Tables that will not grow share the extents that
// others have begun, since a page of memory costs time when it is first touched, and extents are as
// large as several pages. If several extents have the most, it is the one used last, so that a
// small working set stays in the caches. Misuse (an id out of range, a release of a free block, an
// allocation from an empty pool) throws InternalError. Not thread-safe: the step thread owns it.
// After construction nothing allocates memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kv_cache/extent.h"

namespace allspark {

class BlockPool {
 public:
  static constexpr int32_t kNone = -1;  // no block

  // All blocks are free; extents are first taken in order. Requires: 0 <= num_blocks <= INT32_MAX.
  explicit BlockPool(int64_t num_blocks);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_free() const { return num_free_; }
  int64_t extent_blocks() const { return extent_blocks_; }
  // Takes a free block; its reference count is 1. `after`: the block before it in its table; kNone:
  // there is none. `grows`: whether the table will go on. Requires: num_free() > 0. Allocates no
  // memory.
  int32_t Allocate(int32_t after = kNone, bool grows = true);
  // Whether Allocate(after) would return the contiguous block, or one of an extent that is at least
  // half free.
  bool HasRun(int32_t after) const;
  // Requires: the block is in use.
  void AddReference(int32_t block);
  // Drops one reference; the block is free at zero.
  void Release(int32_t block);
  int32_t reference_count(int32_t block) const { return references_[CheckedIndex(block)]; }

 private:
  struct Extent {
    uint32_t free = 0;                       // a bit per block
    int32_t previous = kNone, next = kNone;  // of its list
  };

  size_t CheckedIndex(int32_t block) const;
  Extent& At(int32_t extent) { return extents_[static_cast<size_t>(extent)]; }
  bool IsNextBlockFree(int32_t block) const;
  // The most free blocks of an extent that has at most `limit`; 0: there is none.
  size_t MostFree(int64_t limit) const;
  // The list of the extents that have as many free blocks as `free`.
  int32_t& ListOf(uint32_t free);
  // Changes which of an extent's blocks are free.
  void SetFree(int32_t extent, uint32_t free);

  int64_t num_blocks_;
  int64_t extent_blocks_;
  int64_t num_free_;
  std::vector<Extent> extents_;
  // By number of free blocks: the first extent with that many.
  std::array<int32_t, kMostExtentBlocks + 1> lists_;
  std::vector<int32_t> references_;
};

}  // namespace allspark
