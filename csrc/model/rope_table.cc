#include "model/rope_table.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace allspark {
namespace {

constexpr int64_t kPartPositions = 4096;

}  // namespace

// A cosine and a sine for each pair of each position.
int64_t RopeTable::Bytes(const DecoderShape& shape, int64_t max_length) {
  return max_length * (shape.rotary_dim / 2) * 2 * static_cast<int64_t>(sizeof(float));
}

Result<RopeTable> RopeTable::Create(const DecoderShape& shape, const char* name,
                                    const float* inv_freq, int64_t max_length, Device& device) {
  RopeTable table;
  if (inv_freq == nullptr) return table;
  const int64_t pairs = shape.rotary_dim / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    if (std::isfinite(inv_freq[i])) continue;
    return Status::DataLoss(std::string(name) + "[" + std::to_string(i) + "] is not finite");
  }
  AS_ASSIGN_OR_RETURN(table.buffer_, Buffer::Create(device.allocator(),
                                                    static_cast<size_t>(Bytes(shape, max_length))));
  float* cos_sin = static_cast<float*>(table.buffer_.data());
  const float scaling = shape.rope_scaling;
  // A part of the table at a time, since the host may have no room for all of it.
  std::vector<float> part(static_cast<size_t>(std::min(kPartPositions, max_length) * pairs * 2));
  for (int64_t first = 0; first < max_length; first += kPartPositions) {
    const int64_t count = std::min(kPartPositions, max_length - first);
    device.host_pool().ParallelFor(count, 64, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        float* const values = part.data() + row * pairs * 2;
        for (int64_t i = 0; i < pairs; ++i) {
          const double angle = static_cast<float>(first + row) * inv_freq[i];
          values[2 * i] = static_cast<float>(std::cos(angle)) * scaling;
          values[2 * i + 1] = static_cast<float>(std::sin(angle)) * scaling;
        }
      }
    });
    device.ops().Upload(cos_sin + first * pairs * 2, part.data(),
                        static_cast<size_t>(count * pairs * 2) * sizeof(float));
  }
  table.view_ = {cos_sin, shape.rotary_dim, shape.rope_interleaved};
  return table;
}

}  // namespace allspark
