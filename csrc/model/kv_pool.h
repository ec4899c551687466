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

// The keys or the values of a block in one layer: a part for each KV head, `stride` bytes apart.
struct KvParts {
  unsigned char* data;
  int64_t bytes, stride, count;
};

// A block, as it lies in its first layer. The other layers' parts follow, `layer_stride` bytes
// apart.
struct KvBlock {
  KvParts keys, values;
  int64_t layer_stride, num_layers;

  struct Part {
    unsigned char* data;
    int64_t bytes;
  };
  int64_t num_parts() const { return num_layers * (keys.count + values.count); }
  Part part(int64_t i) const {
    const int64_t per_layer = keys.count + values.count, at = i % per_layer;
    const KvParts& side = at < keys.count ? keys : values;
    const int64_t head = at < keys.count ? at : at - keys.count;
    return {side.data + i / per_layer * layer_stride + head * side.stride, side.bytes};
  }
  // The same parts side by side, from `packed` on.
  KvBlock PackedAt(unsigned char* packed) const {
    const int64_t key_bytes = keys.count * keys.bytes;
    return {{packed, keys.bytes, keys.bytes, keys.count},
            {packed + key_bytes, values.bytes, values.bytes, values.count},
            key_bytes + values.count * values.bytes,
            num_layers};
  }
};

inline void CopyKvBlock(const KvBlock& from, const KvBlock& to) {
  for (int64_t i = 0; i < from.num_parts(); ++i) {
    const KvBlock::Part part = from.part(i);
    std::memcpy(to.part(i).data, part.data, static_cast<size_t>(part.bytes));
  }
}

}  // namespace allspark
