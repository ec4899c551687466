// The best-fit-with-coalescing allocator itself: chunks that tile one reserved region of address
// space. The records of chunks are kept outside of the region. Only Allocate takes heap memory for
// them, so Free cannot fail. Thread-safe. Made by CreateCpuBfcAllocator; this header is for it and
// for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "memory/allocator.h"

namespace allspark {

class BfcRegion : public Allocator {
 public:
  // Reserves `bytes` (rounded down to whole huge pages of 2 MiB; at least one). With `grow`, memory
  // is committed as allocations reach it and given back when freed; without, all of it is committed
  // here for good. ResourceExhausted when the system refuses.
  static Result<std::unique_ptr<BfcRegion>> Create(int64_t bytes, bool grow);
  ~BfcRegion() override;
  BfcRegion(const BfcRegion&) = delete;
  BfcRegion& operator=(const BfcRegion&) = delete;

  void* Allocate(size_t bytes) override;
  // Throws InternalError for a pointer that Allocate did not return or that was freed before.
  void Free(void* ptr) override;
  AllocatorStats Stats() const override;

  // The first byte of the region.
  std::byte* base() const { return base_; }
  // For tests: chunks tile the region, no two free neighbours, the free index and the statistics
  // agree with the chunks. Internal, naming what is wrong.
  Status CheckConsistency() const;

 private:
  // (size, address): the first entry not below (bytes, null) is the best fit, lowest address first.
  using FreeIndex = std::set<std::pair<size_t, std::byte*>>;

  struct Chunk {
    size_t size = 0;
    bool in_use = false;
    // Where a free chunk may still have memory behind it; empty when begin == end.
    std::byte* dirty_begin = nullptr;
    std::byte* dirty_end = nullptr;
    // This chunk's entry of free_index_ while it is in use, so that Free need not allocate one.
    FreeIndex::node_type spare;
  };
  using ChunkMap = std::map<std::byte*, Chunk>;

  BfcRegion(std::byte* mapping, size_t mapping_bytes, std::byte* base, size_t bytes, bool grow);
  void Open();

  std::byte* AllocateLocked(size_t size);
  bool Commit(std::byte* end);
  ChunkMap::iterator MergeWithNext(ChunkMap::iterator chunk);
  void GiveBack(std::byte* begin, Chunk& chunk);

  // Constant after construction.
  std::byte* const mapping_;
  const size_t mapping_bytes_;
  std::byte* const base_;
  const size_t bytes_;
  const bool grow_;

  // Guarded by mutex_.
  mutable std::mutex mutex_;
  ChunkMap chunks_;
  FreeIndex free_index_;
  std::byte* committed_end_;  // Memory of [base_, committed_end_) may be touched.
  std::byte* poisoned_end_;   // Nothing from here on was ever poisoned.
  AllocatorStats stats_;
};

}  // namespace allspark
