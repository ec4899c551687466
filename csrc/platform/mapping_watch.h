// Keeps the process alive if a mapped file can no longer be read: it was made shorter, or its disk
// failed. The system answers a read of such a page with SIGBUS. In a watched mapping, the signal
// handler replaces the page and those after it by zeros, and marks the watch as broken, so that the
// readers of the mapping can report it. Any other SIGBUS goes to the handler that was there before.
// Any thread may call.
#pragma once

#include <cstddef>
#include <utility>

namespace allspark {

class MappingWatch {
 public:
  MappingWatch() = default;  // of nothing
  // Requires: a mapping of a file that lives longer than this and is only read.
  MappingWatch(const void* data, size_t bytes);
  MappingWatch(MappingWatch&& other) noexcept : slot_(std::exchange(other.slot_, nullptr)) {}
  MappingWatch& operator=(MappingWatch&& other) noexcept {
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~MappingWatch();

  // True: since some read, reads have given zeros instead of the file's bytes.
  bool IsBroken() const;

 private:
  struct Slot;
  friend struct MappingSlots;
  Slot* slot_ = nullptr;
};

}  // namespace allspark
