#include "kv_cache/block_pool.h"

#include <bit>
#include <limits>

#include "base/check.h"

namespace allspark {
namespace {

// Where the longest run of free blocks begins.
int BeginOfLongestRun(uint32_t free) {
  uint32_t runs = free;
  while ((runs & runs >> 1) != 0) runs &= runs >> 1;
  return std::countr_zero(runs);
}

}  // namespace

BlockPool::BlockPool(int64_t num_blocks)
    : num_blocks_(num_blocks), extent_blocks_(1), num_free_(num_blocks) {
  AS_CHECK(num_blocks >= 0 && num_blocks <= std::numeric_limits<int32_t>::max())
      << "num_blocks is " << num_blocks << ", outside [0, 2^31 - 1]";
  extent_blocks_ = ExtentBlocks(num_blocks);
  references_.assign(static_cast<size_t>(num_blocks), 0);
  extents_.resize(static_cast<size_t>(num_blocks / extent_blocks_));
  lists_.fill(kNone);
  const uint32_t all = (1u << extent_blocks_) - 1;
  // The last one in is the first one out.
  for (auto extent = static_cast<int32_t>(extents_.size()) - 1; extent >= 0; --extent) {
    SetFree(extent, all);
  }
}

size_t BlockPool::CheckedIndex(int32_t block) const {
  AS_CHECK(block >= 0 && block < num_blocks_)
      << "block is " << block << ", outside [0, " << num_blocks_ << ")";
  return static_cast<size_t>(block);
}

int32_t& BlockPool::ListOf(uint32_t free) {
  return lists_[static_cast<size_t>(std::popcount(free))];
}

void BlockPool::SetFree(int32_t index, uint32_t free) {
  Extent& extent = At(index);
  if (extent.free != 0) {
    (extent.previous != kNone ? At(extent.previous).next : ListOf(extent.free)) = extent.next;
    if (extent.next != kNone) At(extent.next).previous = extent.previous;
  }
  extent.free = free;
  if (free == 0) return;
  int32_t& first = ListOf(free);
  extent.previous = kNone;
  extent.next = first;
  if (first != kNone) At(first).previous = index;
  first = index;
}

// False at the extent's end: the next extent's memory is elsewhere.
bool BlockPool::IsNextBlockFree(int32_t block) const {
  const int64_t next = block + 1;
  return next % extent_blocks_ != 0 && reference_count(static_cast<int32_t>(next)) == 0;
}

size_t BlockPool::MostFree(int64_t limit) const {
  auto most = static_cast<size_t>(limit);
  while (most > 0 && lists_[most] == kNone) --most;
  return most;
}

bool BlockPool::HasRun(int32_t after) const {
  return (after != kNone && IsNextBlockFree(after)) ||
         2 * static_cast<int64_t>(MostFree(extent_blocks_)) >= extent_blocks_;
}

int32_t BlockPool::Allocate(int32_t after, bool grows) {
  AS_CHECK(num_free_ > 0) << "none of the " << num_blocks_ << " blocks is free";
  AS_CHECK(after == kNone || reference_count(after) > 0) << "block " << after << " is free";
  const auto extent_blocks = static_cast<int32_t>(extent_blocks_);
  int32_t block;
  if (after != kNone && IsNextBlockFree(after)) {
    block = after + 1;
  } else {
    size_t free = grows ? 0 : MostFree(extent_blocks_ - 1);
    if (free == 0) free = MostFree(extent_blocks_);
    const int32_t extent = lists_[free];
    block = extent * extent_blocks + BeginOfLongestRun(At(extent).free);
  }
  const int32_t extent = block / extent_blocks;
  SetFree(extent, At(extent).free & ~(1u << block % extent_blocks));
  --num_free_;
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
  if (--count > 0) return;
  const auto extent_blocks = static_cast<int32_t>(extent_blocks_);
  const int32_t extent = block / extent_blocks;
  SetFree(extent, At(extent).free | 1u << block % extent_blocks);
  ++num_free_;
}

}  // namespace allspark
