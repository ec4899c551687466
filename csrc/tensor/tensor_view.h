// TensorView: shape, strides and a pointer, copied by value; never owns and never outlives its
// owner.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace allspark {

inline constexpr int kMaxRank = 4;

struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kUndefined;
  int32_t rank = 0;
  int64_t dims[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};  // elements
};

// Bytes of one element; 0 for kUndefined; kUInt4 counts as 1 per two elements and is not served
// here.
int64_t ElementBytes(DType dtype);
const char* DTypeName(DType dtype);  // "float32", "bfloat16", ...

}  // namespace allspark
