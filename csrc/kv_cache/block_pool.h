// Block ids and reference counts of the paged KV cache: integers only, no memory, no device.
// A block holds block_size tokens of all layers. Not thread-safe: the step thread owns it.
#pragma once

#include <cstdint>
#include <vector>

namespace allspark {

class BlockPool {
 public:
  explicit BlockPool(int64_t num_blocks);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  // Reference count 1. Requires: num_free() > 0. Allocates no memory.
  int32_t Allocate();
  void AddReference(int32_t block);
  // Drops one reference; the block is free at zero.
  void Release(int32_t block);
  int32_t reference_count(int32_t block) const { return references_[static_cast<size_t>(block)]; }

 private:
  int64_t num_blocks_;
  std::vector<int32_t> free_;        // a stack; capacity fixed
  std::vector<int32_t> references_;
};

}  // namespace allspark
