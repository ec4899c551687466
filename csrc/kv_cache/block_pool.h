// Block ids and reference counts of the paged KV cache: integers only, no memory, no device. A
// block holds block_size tokens of all layers; a sequence's block table lists its blocks in order
// of position. A block with one reference belongs to one table, which may write it; a block with
// more is shared and read-only. Free ids are handed out last-freed first, so that a small working
// set stays in the caches. Misuse (an id out of range, a release of a free block, an allocation
// from an empty pool) throws InternalError. Not thread-safe: the step thread owns it. After
// construction nothing allocates memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace allspark {

class BlockPool {
 public:
  // All blocks are free; the first allocations give 0, 1, 2, ... Requires: 0 <= num_blocks <=
  // INT32_MAX.
  explicit BlockPool(int64_t num_blocks);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  // Reference count 1. Requires: num_free() > 0. Allocates no memory.
  int32_t Allocate();
  // Requires: the block is in use.
  void AddReference(int32_t block);
  // Drops one reference; the block is free at zero.
  void Release(int32_t block);
  int32_t reference_count(int32_t block) const { return references_[CheckedIndex(block)]; }

 private:
  size_t CheckedIndex(int32_t block) const;

  int64_t num_blocks_;
  std::vector<int32_t> free_;  // a stack; capacity fixed
  std::vector<int32_t> references_;
};

}  // namespace allspark
