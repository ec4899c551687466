// The KV pool as a decoder sees it.
#pragma once

#include <cstdint>

namespace allspark {

// Block ids index it; num_blocks says how many make an extent (kv_cache/extent.h).
struct KvPool {
  unsigned char* data = nullptr;
  int64_t num_blocks = 0;
};

}  // namespace allspark
