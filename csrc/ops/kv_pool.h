// The KV pool: blocks of keys and values, by id. What it holds is said here; how a block lies in
// its memory is the device's choice, which only the device's own operations and copies know.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace allspark {

struct KvShape {
  DType dtype = DType::kUndefined;
  int64_t num_layers = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t block_size = 0;  // tokens: 16, 32, 64 or 128

  int64_t cols() const { return kv_heads * head_dim; }  // of a token's keys, and of its values
  bool operator==(const KvShape&) const = default;
};

struct KvPool {
  KvShape shape;
  unsigned char* data = nullptr;  // num_blocks * Device::KvBlockBytes(shape), the device's
  int64_t num_blocks = 0;
};

// One layer of a pool.
struct KvLayer {
  KvPool pool;
  int64_t layer = 0;

  const KvShape& shape() const { return pool.shape; }
};

}  // namespace allspark
