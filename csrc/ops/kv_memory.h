// KvMemory: a KV pool that owns its memory on a device.
#pragma once

#include <cstdint>
#include <utility>

#include "allspark/status.h"
#include "memory/allocator.h"
#include "ops/device.h"
#include "ops/kv_pool.h"

namespace allspark {

class KvMemory {
 public:
  KvMemory() = default;
  // `device` outlives it.
  static Result<KvMemory> Create(Device& device, const KvShape& shape, int64_t num_blocks) {
    const int64_t block_bytes = device.KvBlockBytes(shape);
    KvMemory memory;
    AS_ASSIGN_OR_RETURN(
        memory.buffer_,
        Buffer::Create(device.allocator(), static_cast<size_t>(num_blocks * block_bytes)));
    memory.block_bytes_ = block_bytes;
    memory.pool_ = {shape, static_cast<unsigned char*>(memory.buffer_.data()), num_blocks};
    device.PlaceKv(memory.pool_);
    return memory;
  }

  const KvPool& pool() const { return pool_; }
  int64_t block_bytes() const { return block_bytes_; }
  int64_t bytes() const { return static_cast<int64_t>(buffer_.bytes()); }

 private:
  Buffer buffer_;
  int64_t block_bytes_ = 0;
  KvPool pool_;
};

}  // namespace allspark
