// Where a block of the KV pool lies in a device's memory.
#pragma once

#include <cstdint>

namespace allspark {

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
};

}  // namespace allspark
