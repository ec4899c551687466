// RopeTable: cos and sin of every position's angles, computed once at load. Angles are float32
// products, as in the reference implementation (transformers): in higher precision they would be
// other angles at long positions.
#pragma once

#include <cstdint>

#include "allspark/status.h"
#include "memory/allocator.h"
#include "model/decoder_shape.h"
#include "ops/device.h"
#include "ops/rope.h"

namespace allspark {

class RopeTable {
 public:
  // `inv_freq` is the tensor `name`; null: an empty table. ResourceExhausted when the device has
  // no room; DataLoss when a frequency is not finite.
  static Result<RopeTable> Create(const DecoderShape& shape, const char* name,
                                  const float* inv_freq, int64_t max_length, Device& device);

  static int64_t Bytes(const DecoderShape& shape, int64_t max_length);

  RopeTable() = default;
  const RopeView& view() const { return view_; }

 private:
  Buffer buffer_;
  RopeView view_;
};

}  // namespace allspark
