// The rows of logits of a step. They are the device's, which also samples from them; the host reads
// only what a request asks for.
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
  int64_t vocab_size() const { return vocab_size_; }
  // Row i, on the device.
  float* row(int64_t i) { return static_cast<float*>(on_device_.data()) + i * vocab_size_; }
  // `count` rows from `row` on for the host, until the next call: the same memory where the
  // device's is the host's.
  const float* Read(const float* row, int64_t count);

 private:
  Device* device_ = nullptr;
  int64_t num_rows_ = 0, vocab_size_ = 0;
  Buffer on_device_;
  std::vector<float> on_host_;
};

}  // namespace allspark
