#include "memory/system_allocator.h"

#include <cstdlib>
#include <new>

#include "base/check.h"
#include "base/int_math.h"
#include "base/log.h"

namespace allspark {

SystemAllocator::SystemAllocator(int64_t budget_bytes) { stats_.pool_bytes = budget_bytes; }

SystemAllocator::~SystemAllocator() {
  if (stats_.num_live != 0) {
    AS_LOG(kError) << "an allocator ends with " << stats_.num_live << " allocations of "
                   << stats_.bytes_in_use << " bytes still in use";
  }
}

void* SystemAllocator::Allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t left = stats_.pool_bytes - stats_.bytes_in_use;
  // Compared before rounding up, which could overflow.
  if (left <= 0 || bytes > static_cast<size_t>(left)) return nullptr;
  const size_t size = AlignUp(bytes, kBufferAlignment);
  const int64_t signed_size = static_cast<int64_t>(size);
  if (signed_size > left) return nullptr;
  void* const ptr = std::aligned_alloc(kBufferAlignment, size);
  if (ptr == nullptr) return nullptr;
  try {
    sizes_.emplace(ptr, size);
  } catch (const std::bad_alloc&) {
    std::free(ptr);
    return nullptr;
  }
  ++stats_.num_allocs;
  ++stats_.num_live;
  stats_.bytes_in_use += signed_size;
  return ptr;
}

void SystemAllocator::Free(void* ptr) {
  if (ptr == nullptr) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sizes_.find(ptr);
    AS_CHECK(found != sizes_.end()) << "freed pointer " << ptr << " is no live allocation";
    --stats_.num_live;
    stats_.bytes_in_use -= static_cast<int64_t>(found->second);
    sizes_.erase(found);
  }
  std::free(ptr);
}

AllocatorStats SystemAllocator::Stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  AllocatorStats stats = stats_;
  stats.largest_free_bytes = stats.pool_bytes - stats.bytes_in_use;
  return stats;
}

}  // namespace allspark
