#include "tensor/tensor.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/check.h"

namespace allspark {

namespace {

std::string ShapeText(std::span<const int64_t> dims) {
  std::string text = "[";
  for (const int64_t dim : dims) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(dim);
  }
  return text + "]";
}

}  // namespace

TensorView ContiguousView(const void* data, DType dtype, std::span<const int64_t> dims) {
  AS_CHECK(dims.size() <= static_cast<size_t>(kMaxRank)) << "rank " << dims.size();
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.rank = static_cast<int32_t>(dims.size());
  int64_t stride = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    AS_CHECK(dims[i] >= 0) << "shape " << ShapeText(dims);
    view.dims[i] = dims[i];
    view.strides[i] = stride;
    // An empty dimension must not make the strides of the outer ones zero.
    stride *= std::max<int64_t>(dims[i], 1);
  }
  return view;
}

Result<Tensor> Tensor::Create(Allocator* allocator, DType dtype, std::span<const int64_t> dims) {
  if (dims.size() > static_cast<size_t>(kMaxRank)) {
    return Status::InvalidArgument("the shape " + ShapeText(dims) + " has rank " +
                                   std::to_string(dims.size()) + "; it must be at most " +
                                   std::to_string(kMaxRank));
  }
  int64_t bytes = ElementBytes(dtype);
  if (bytes == 0) {
    return Status::InvalidArgument(std::string("a tensor cannot hold elements of type ") +
                                   DTypeName(dtype));
  }
  bool is_empty = false;
  for (const int64_t dim : dims) {
    if (dim < 0) {
      return Status::InvalidArgument("the shape " + ShapeText(dims) + " has a negative dimension");
    }
    is_empty |= dim == 0;
    // Strides are computed even where the tensor is empty, so they must not overflow either.
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(dim, 1), &bytes)) {
      return Status::InvalidArgument("the shape " + ShapeText(dims) + " has too many elements");
    }
  }
  Result<Buffer> buffer = Buffer::Create(allocator, is_empty ? 0 : static_cast<size_t>(bytes));
  if (!buffer.ok()) return buffer.status();
  Tensor tensor;
  tensor.buffer_ = std::move(buffer).value();
  tensor.dtype_ = dtype;
  tensor.rank_ = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), tensor.dims_.begin());
  return tensor;
}

int64_t Tensor::num_elements() const {
  if (dtype_ == DType::kUndefined) return 0;
  int64_t count = 1;
  for (const int64_t dim : dims()) count *= dim;
  return count;
}

}  // namespace allspark
