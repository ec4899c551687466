#include "kv_cache/block_pool.h"

#include <limits>

#include "base/check.h"

namespace allspark {

BlockPool::BlockPool(int64_t num_blocks) : num_blocks_(num_blocks) {
  AS_CHECK(num_blocks >= 0 && num_blocks <= std::numeric_limits<int32_t>::max())
      << "num_blocks is " << num_blocks << ", outside [0, 2^31 - 1]";
  references_.assign(static_cast<size_t>(num_blocks), 0);
  free_.reserve(static_cast<size_t>(num_blocks));
  for (int64_t block = num_blocks - 1; block >= 0; --block) {
    free_.push_back(static_cast<int32_t>(block));
  }
}

size_t BlockPool::CheckedIndex(int32_t block) const {
  AS_CHECK(block >= 0 && block < num_blocks_)
      << "block is " << block << ", outside [0, " << num_blocks_ << ")";
  return static_cast<size_t>(block);
}

int32_t BlockPool::Allocate() {
  AS_CHECK(!free_.empty()) << "none of the " << num_blocks_ << " blocks is free";
  const int32_t block = free_.back();
  free_.pop_back();
  references_[static_cast<size_t>(block)] = 1;
  return block;
}

void BlockPool::AddReference(int32_t block) {
  int32_t& count = references_[CheckedIndex(block)];
  AS_CHECK(count > 0) << "block " << block << " is free and cannot be shared";
  AS_CHECK(count < std::numeric_limits<int32_t>::max()) << "block " << block << " is over-shared";
  ++count;
}

void BlockPool::Release(int32_t block) {
  int32_t& count = references_[CheckedIndex(block)];
  AS_CHECK(count > 0) << "block " << block << " is free already";
  // Every block is in free_ at most once, so the reserved capacity is never exceeded.
  if (--count == 0) free_.push_back(block);
}

}  // namespace allspark
