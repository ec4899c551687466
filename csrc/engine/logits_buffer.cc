#include "engine/logits_buffer.h"

#include <utility>

namespace allspark {

Result<LogitsBuffer> LogitsBuffer::Create(Device& device, int64_t num_rows, int64_t vocab_size) {
  LogitsBuffer logits;
  logits.device_ = &device;
  logits.num_rows_ = num_rows;
  logits.vocab_size_ = vocab_size;
  const auto count = static_cast<size_t>(num_rows * vocab_size);
  AS_ASSIGN_OR_RETURN(logits.on_device_, Buffer::Create(device.allocator(), count * sizeof(float)));
  if (device.has_own_memory()) logits.on_host_.resize(count);
  return logits;
}

const float* LogitsBuffer::Read(const float* row, int64_t count) {
  if (on_host_.empty()) return row;
  device_->ops().Download(on_host_.data(), row,
                          static_cast<size_t>(count * vocab_size_) * sizeof(float));
  return on_host_.data();
}

}  // namespace allspark
