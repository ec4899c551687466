#include "memory/step_arena.h"

#include <algorithm>

#include "base/check.h"
#include "base/int_math.h"

namespace allspark {

namespace {
constexpr int64_t kAlignment = 64;
}  // namespace

void* StepArena::Allocate(int64_t bytes) {
  AS_CHECK(bytes >= 0 && bytes <= capacity() - used_)
      << "the step arena of " << capacity() << " bytes has " << capacity() - used_ << " left, "
      << bytes << " wanted";
  void* const ptr = static_cast<std::byte*>(buffer_.data()) + used_;
  // The end of the buffer may cut the last padding short.
  const int64_t padded = bytes <= capacity() - kAlignment ? AlignUp(bytes, kAlignment) : bytes;
  used_ = std::min(used_ + padded, capacity());
  peak_ = std::max(peak_, used_);
  return ptr;
}

}  // namespace allspark
