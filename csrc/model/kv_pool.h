// The KV pool as a decoder sees it, and where one of its blocks lies.
#pragma once

#include <cstdint>
#include <cstring>

namespace allspark {

// Block ids index it; num_blocks says how many make an extent (kv_cache/extent.h).
struct KvPool {
  unsigned char* data = nullptr;
  int64_t num_blocks = 0;
};

// A block's parts: the keys or the values of one layer and KV head each, `stride` bytes apart.
struct KvBlock {
  unsigned char* data;
  int64_t part_bytes, stride, num_parts;

  unsigned char* part(int64_t i) const { return data + i * stride; }
  // The same parts side by side, from `data` on.
  KvBlock PackedAt(unsigned char* packed) const {
    return {packed, part_bytes, part_bytes, num_parts};
  }
};

inline void CopyKvBlock(const KvBlock& from, const KvBlock& to) {
  for (int64_t i = 0; i < from.num_parts; ++i) {
    std::memcpy(to.part(i), from.part(i), static_cast<size_t>(from.part_bytes));
  }
}

}  // namespace allspark
