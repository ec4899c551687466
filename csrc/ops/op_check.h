// Checks and splits that several ops share. Private to ops/.
#pragma once

#include <algorithm>

#include "base/check.h"
#include "ops/op_context.h"
#include "tensor/tensor_view.h"

namespace allspark::internal {

inline int Slot(DType dtype) { return static_cast<int>(dtype); }

inline void CheckMatrix(const char* op, const char* name, const ConstMatrix& x) {
  AS_CHECK(x.rows >= 0 && x.cols > 0 && x.ld >= x.cols)
      << op << ": " << name << " is [" << x.rows << ", " << x.cols << "] with row stride " << x.ld;
  AS_CHECK(x.data != nullptr || x.rows == 0) << op << ": " << name << " has no data";
}

inline void CheckDType(const char* op, const char* name, DType actual, DType expected) {
  AS_CHECK(actual == expected) << op << ": " << name << " is " << DTypeName(actual) << "; expected "
                               << DTypeName(expected);
}

inline void CheckSameShape(const char* op, const ConstMatrix& x, const ConstMatrix& y) {
  AS_CHECK(x.rows == y.rows && x.cols == y.cols) << op << ": x is [" << x.rows << ", " << x.cols
                                                 << "], y is [" << y.rows << ", " << y.cols << "]";
}

inline void CheckKernel(const char* op, DType dtype, bool present, const OpContext& context) {
  AS_CHECK(present) << op << ": kernel table '" << context.kernels->name << "' has no entry for "
                    << DTypeName(dtype);
}

inline void CheckScales(const char* op, const WeightScales& scales, DType weight, int64_t k) {
  const int64_t size = scales.group_size;
  AS_CHECK(scales.scale != nullptr && size > 0 && k % size == 0 &&
           (size == k || size % kernels::kSumBlock == 0))
      << op << ": a scale for every " << size << " of " << k << " input features";
  const bool has_form =
      scales.offset != nullptr || scales.table != nullptr || scales.high != nullptr;
  AS_CHECK(!has_form || (size % kernels::kSumBlock == 0 && size <= kernels::kLargestFormGroup))
      << op << ": groups of " << size << "; offsets, tables and 6 bits need 16 to "
      << kernels::kLargestFormGroup;
  AS_CHECK((scales.table == nullptr && scales.high == nullptr) || weight == DType::kUInt4)
      << op << ": a table or upper bits beside " << DTypeName(weight) << " weights";
}

// Of int8 rows of `cols` columns.
inline void CheckScaleGroup(const char* op, int64_t scale_group, int64_t cols) {
  AS_CHECK(scale_group == 0 ||
           (scale_group > 0 && scale_group % kernels::kSumBlock == 0 && cols % scale_group == 0))
      << op << ": a scale for every " << scale_group << " of " << cols << " columns";
}

// Elements of a packed weight in one 32-bit lane; 0 where the dtype cannot be packed.
inline int64_t PackedPerLane(DType dtype) {
  if (dtype == DType::kUInt4) return 8;
  const int64_t bytes = ElementBytes(dtype);
  return bytes > 0 && bytes <= 4 ? 4 / bytes : 0;
}

// For ops whose result may be int8 (quantize.cc): a thread computes a row in float32 in its
// ScratchRow; QuantizeRows then quantises it into rows [begin, end) of q.
void CheckQuantized(const char* op, const OpContext& context, const Matrix& y);
float* ScratchRow(const char* op, const OpContext& context, int64_t cols, int thread_id);
void QuantizeRows(const OpContext& context, const float* x, int64_t ldx, const Matrix& q,
                  int64_t begin, int64_t end);

// y = x in the dtype of y, on the calling thread (convert.cc): for one thread's rows of a batch.
void ConvertRows(const char* op, const OpContext& context, const ConstMatrix& x, const Matrix& y);

// Rows of a matrix that are worth a thread: below this a region costs more than it saves.
// A parallel region costs a few microseconds, in which one core handles about this many elements.
inline int64_t RowGrain(int64_t cols) {
  constexpr int64_t kElementsPerRegion = 8192;
  return std::max<int64_t>(1, kElementsPerRegion / std::max<int64_t>(cols, 1));
}

inline void* RowAt(const Matrix& x, int64_t row) {
  return static_cast<unsigned char*>(x.data) + row * x.ld * ElementBytes(x.dtype);
}
inline const void* RowAt(const ConstMatrix& x, int64_t row) {
  return static_cast<const unsigned char*>(x.data) + row * x.ld * ElementBytes(x.dtype);
}

}  // namespace allspark::internal
