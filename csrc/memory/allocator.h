// The memory interface of a device: Allocator, its statistics, and Buffer, which owns an
// allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "allspark/status.h"

namespace allspark {

inline constexpr size_t kBufferAlignment = 256;  // of every allocation, bytes

struct AllocatorStats {
  int64_t num_allocs = 0;    // calls so far
  int64_t num_live = 0;      // allocations not freed yet
  int64_t bytes_in_use = 0;  // requested sizes, rounded up to kBufferAlignment
  int64_t pool_bytes = 0;    // the region's reserved size
  int64_t largest_free_bytes = 0;
};

// Thread-safe. Allocate never throws.
class Allocator {
 public:
  virtual ~Allocator() = default;
  // Null when there is no room. bytes == 0 gives null.
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* ptr) = 0;  // null is a no-op
  virtual AllocatorStats Stats() const = 0;
};

// Owns one allocation; move-only.
class Buffer {
 public:
  Buffer() = default;
  static Result<Buffer> Create(Allocator* allocator, size_t bytes);
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(allocator_, other.allocator_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) allocator_->Free(data_);
  }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  Allocator* allocator_ = nullptr;
};

}  // namespace allspark
