// Hands each allocation to the system's heap, within a budget: what BFC_ALLOCATOR=OFF selects.
// Keeps the same statistics as the region allocator. Thread-safe.
#pragma once

#include <mutex>
#include <unordered_map>

#include "memory/allocator.h"

namespace allspark {

class SystemAllocator : public Allocator {
 public:
  // budget_bytes: the most that may be in use at once; reported as pool_bytes.
  explicit SystemAllocator(int64_t budget_bytes);
  ~SystemAllocator() override;

  void* Allocate(size_t bytes) override;
  // Throws InternalError for a pointer that Allocate did not return or that was freed before.
  void Free(void* ptr) override;
  AllocatorStats Stats() const override;

 private:
  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;
  AllocatorStats stats_;
};

}  // namespace allspark
