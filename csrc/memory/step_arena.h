// Scratch memory of one step: bump allocation from one Buffer, reset before each step. Sized once
// at load from the largest step; running out is a broken invariant, not a user error. One thread at
// a time.
#pragma once

#include <cstdint>

#include "memory/allocator.h"

namespace allspark {

class StepArena {
 public:
  StepArena() = default;
  explicit StepArena(Buffer buffer) : buffer_(std::move(buffer)) {}

  void Reset() { used_ = 0; }
  // 64-byte aligned; throws InternalError when the arena is too small.
  void* Allocate(int64_t bytes);
  template <typename T>
  T* Allocate(int64_t count) {
    return static_cast<T*>(Allocate(count * static_cast<int64_t>(sizeof(T))));
  }
  int64_t used() const { return used_; }
  int64_t peak() const { return peak_; }
  int64_t capacity() const { return static_cast<int64_t>(buffer_.bytes()); }

 private:
  Buffer buffer_;
  int64_t used_ = 0;
  int64_t peak_ = 0;
};

}  // namespace allspark
