#include "model/rope_table.h"

#include <cmath>
#include <string>
#include <utility>

namespace allspark {

// A cosine and a sine for each pair of each position.
int64_t RopeTable::Bytes(const DecoderShape& shape, int64_t max_length) {
  return max_length * (shape.rotary_dim / 2) * 2 * static_cast<int64_t>(sizeof(float));
}

Result<RopeTable> RopeTable::Create(const DecoderShape& shape, const char* name,
                                    const float* inv_freq, int64_t max_length, ThreadPool* pool,
                                    Allocator* allocator) {
  RopeTable table;
  if (inv_freq == nullptr) return table;
  const int64_t pairs = shape.rotary_dim / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    if (std::isfinite(inv_freq[i])) continue;
    return Status::DataLoss(std::string(name) + "[" + std::to_string(i) + "] is not finite");
  }
  Result<Buffer> buffer = Buffer::Create(allocator, static_cast<size_t>(Bytes(shape, max_length)));
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
