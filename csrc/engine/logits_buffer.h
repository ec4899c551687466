// The rows of logits of a step: where the device writes them, and where the host reads them. These
// are the same memory where the device's is the host's.
#pragma once

#include <cstdint>
#include <vector>

#include "allspark/status.h"
#include "memory/allocator.h"
#include "ops/device.h"

namespace allspark {

class LogitsBuffer {
 public:
  LogitsBuffer() = default;
  // `device` outlives it.
  static Result<LogitsBuffer> Create(Device& device, int64_t num_rows, int64_t vocab_size);

  int64_t num_rows() const { return num_rows_; }
  // Row i, on the device and on the host.
  float* OnDevice(int64_t i) { return static_cast<float*>(on_device_.data()) + i * vocab_size_; }
  float* OnHost(int64_t i) {
    return on_host_.empty() ? OnDevice(i) : on_host_.data() + i * vocab_size_;
  }
  // Rows [begin, begin + count) are on the host when it returns.
  void Fetch(int64_t begin, int64_t count);

 private:
  Device* device_ = nullptr;
  int64_t num_rows_ = 0, vocab_size_ = 0;
  Buffer on_device_;
  std::vector<float> on_host_;
};

}  // namespace allspark
