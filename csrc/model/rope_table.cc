#include "model/rope_table.h"

#include <cmath>
#include <string>
#include <utility>

namespace allspark {

Result<RopeTable> RopeTable::Create(const DecoderShape& shape, const float* inv_freq,
                                    int64_t max_length, ThreadPool* pool, Allocator* allocator) {
  RopeTable table;
  if (shape.rotary_dim == 0) return table;
  const int64_t pairs = shape.rotary_dim / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    if (std::isfinite(inv_freq[i])) continue;
    return Status::DataLoss("rope.inv_freq[" + std::to_string(i) + "] is not finite");
  }
  Result<Buffer> buffer =
      Buffer::Create(allocator, static_cast<size_t>(max_length * pairs * 2) * sizeof(float));
  if (!buffer.ok()) return buffer.status();
  table.buffer_ = std::move(*buffer);
  float* cos_sin = static_cast<float*>(table.buffer_.data());
  const float scaling = shape.rope_scaling;
  pool->ParallelFor(max_length, 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t position = begin; position < end; ++position) {
      float* row = cos_sin + position * pairs * 2;
      for (int64_t i = 0; i < pairs; ++i) {
        const double angle = static_cast<float>(position) * inv_freq[i];
        row[2 * i] = static_cast<float>(std::cos(angle)) * scaling;
        row[2 * i + 1] = static_cast<float>(std::sin(angle)) * scaling;
      }
    }
  });
  table.view_ = {cos_sin, max_length, shape.rotary_dim, shape.rope_interleaved};
  return table;
}

}  // namespace allspark
