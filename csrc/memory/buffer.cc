#include <string>

#include "memory/allocator.h"

namespace allspark {

Result<Buffer> Buffer::Create(Allocator* allocator, size_t bytes) {
  Buffer buffer;
  if (bytes == 0) return buffer;
  buffer.data_ = allocator->Allocate(bytes);
  if (buffer.data_ == nullptr) {
    const AllocatorStats stats = allocator->Stats();
    return Status::ResourceExhausted(
        "cannot allocate " + std::to_string(bytes) + " bytes: the pool has " +
        std::to_string(stats.pool_bytes) + " bytes, " + std::to_string(stats.bytes_in_use) +
        " in use, the largest free piece " + std::to_string(stats.largest_free_bytes) +
        (static_cast<size_t>(stats.largest_free_bytes) >= bytes
             ? ", but the system gives no memory for it"
             : ""));
  }
  buffer.bytes_ = bytes;
  buffer.allocator_ = allocator;
  return buffer;
}

}  // namespace allspark
