// RopeTable: cos and sin of every position's angles, computed once at load. Angles are float32
// products, as in the reference implementation (transformers): in higher precision they would be
// other angles at long positions.
#pragma once

#include <cstdint>

#include "allspark/status.h"
#include "memory/allocator.h"
#include "model/decoder_shape.h"
#include "ops/rope.h"
#include "platform/thread_pool.h"

namespace allspark {

class RopeTable {
 public:
  // An empty table where the shape has no rope. ResourceExhausted when the allocator has no room;
  // DataLoss when a frequency is not finite.
  static Result<RopeTable> Create(const DecoderShape& shape, const float* inv_freq,
                                  int64_t max_length, ThreadPool* pool, Allocator* allocator);

  RopeTable() = default;
  const RopeView& view() const { return view_; }

 private:
  Buffer buffer_;
  RopeView view_;
};

}  // namespace allspark
