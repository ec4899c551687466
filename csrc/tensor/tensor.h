// Tensor: a dense row-major array that owns its memory, and the checked way to make a TensorView of
// memory owned by someone else. Move-only; one thread at a time. Does no arithmetic.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "memory/allocator.h"
#include "tensor/tensor_view.h"

namespace allspark {

// Row-major without gaps.
// Requires: at most kMaxRank dims, none negative; AS_CHECKed.
TensorView ContiguousView(const void* data, DType dtype, std::span<const int64_t> dims);

class Tensor {
 public:
  Tensor() = default;  // No dtype, no elements.

  // Allocates the elements; their content is undefined. InvalidArgument for an invalid shape or a
  // dtype without whole bytes per element, ResourceExhausted when the allocator has no room.
  static Result<Tensor> Create(Allocator* allocator, DType dtype, std::span<const int64_t> dims);

  DType dtype() const { return dtype_; }
  int32_t rank() const { return rank_; }
  std::span<const int64_t> dims() const { return {dims_.data(), static_cast<size_t>(rank_)}; }
  // 1 for rank 0.
  int64_t num_elements() const;
  int64_t bytes() const { return static_cast<int64_t>(buffer_.bytes()); }

  void* data() { return buffer_.data(); }
  const void* data() const { return buffer_.data(); }
  // The caller names the element type; nothing is converted.
  template <typename T>
  T* data_as() {
    return static_cast<T*>(buffer_.data());
  }
  template <typename T>
  const T* data_as() const {
    return static_cast<const T*>(buffer_.data());
  }
  TensorView view() const { return ContiguousView(data(), dtype_, dims()); }

 private:
  Buffer buffer_;
  DType dtype_ = DType::kUndefined;
  int32_t rank_ = 0;
  std::array<int64_t, kMaxRank> dims_ = {};
};

}  // namespace allspark
