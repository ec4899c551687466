// Keeps the process alive where a mapped file can no longer be read: somebody made it shorter, or
// its disk failed. The system answers a read of such a page with SIGBUS. For pages that are watched
// the handler in here puts zeros in the file's place and notes it, so that whoever reads the
// mapping can say so; any other SIGBUS goes to the handler that was there before. Any thread may
// call.
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

  // True: from some read on it was zeros that were read.
  bool IsBroken() const;

 private:
  struct Slot;
  friend struct MappingSlots;
  Slot* slot_ = nullptr;
};

}  // namespace allspark
