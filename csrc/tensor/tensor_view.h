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

// Bits of one element; 0 for kUndefined, and for kInt8UInt4, which no tensor has.
constexpr int64_t ElementBits(DType dtype) {
  switch (dtype) {
    case DType::kInt64:
      return 64;
    case DType::kFloat32:
    case DType::kInt32:
      return 32;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
      return 16;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return 8;
    case DType::kUInt4:
      return 4;
    case DType::kUInt2:
      return 2;
    case DType::kUndefined:
    case DType::kInt8UInt4:
      return 0;
  }
  return 0;
}
// Bytes of one element; 0 also for kUInt4 and kUInt2, which have several elements in a byte.
constexpr int64_t ElementBytes(DType dtype) { return ElementBits(dtype) / 8; }
// Bytes of so many elements; of kUInt4 and kUInt2 whole bytes.
constexpr int64_t PackedBytes(DType dtype, int64_t elements) {
  return elements * ElementBits(dtype) / 8;
}
// The dtypes of a checkpoint's weights that are not quantised.
constexpr bool IsFloat(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}
const char* DTypeName(DType dtype);  // "float32", "bfloat16", ...

}  // namespace allspark
