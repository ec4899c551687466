// Checks that several ops share. Private to ops/.
#pragma once

#include "base/check.h"
#include "ops/device_ops.h"
#include "tensor/tensor_view.h"

namespace allspark::internal {

inline void CheckMatrix(const char* op, const char* name, const ConstMatrix& x) {
  AS_CHECK(x.rows >= 0 && x.cols > 0 && x.ld >= x.cols)
      << op << ": " << name << " is [" << x.rows << ", " << x.cols << "] with row stride " << x.ld;
  AS_CHECK(x.data != nullptr || x.rows == 0) << op << ": " << name << " has no data";
}

inline void CheckDType(const char* op, const char* name, DType actual, DType expected) {
  AS_CHECK(actual == expected) << op << ": " << name << " is " << DTypeName(actual) << "; expected "
                               << DTypeName(expected);
}

inline void CheckFloats(const char* op, const char* name, const ConstMatrix& x) {
  CheckMatrix(op, name, x);
  CheckDType(op, name, x.dtype, DType::kFloat32);
}

inline void CheckSameShape(const char* op, const ConstMatrix& x, const ConstMatrix& y,
                           const char* y_name = "y") {
  AS_CHECK(x.rows == y.rows && x.cols == y.cols)
      << op << ": x is [" << x.rows << ", " << x.cols << "], " << y_name << " is [" << y.rows
      << ", " << y.cols << "]";
}

// `dtype` is the one that a message names.
inline void CheckHas(const char* op, const OpContext& context, DType dtype, OpKind kind,
                     DType first = DType::kUndefined, DType second = DType::kUndefined) {
  AS_CHECK(context.ops->Has(kind, first, second)) << op << ": kernel table '" << context.ops->name()
                                                  << "' has no entry for " << DTypeName(dtype);
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
  if (scales.type == kernels::ScaleType::kCode) {
    AS_CHECK(k % kernels::kScaleBlock == 0 && kernels::kScaleBlock % size == 0 &&
             scales.block_scale != nullptr &&
             (scales.offset == nullptr) == (scales.block_offset == nullptr))
        << op << ": codes of scales for " << size << " of " << k
        << " input features, which must be blocks of " << kernels::kScaleBlock;
  }
  AS_CHECK(scales.type != kernels::ScaleType::kPower || scales.offset == nullptr)
      << op << ": offsets beside powers of two as scales";
  AS_CHECK((scales.table == nullptr && scales.high == nullptr) || weight == DType::kUInt4)
      << op << ": a table or upper bits beside " << DTypeName(weight) << " weights";
}

inline void CheckInt8Scales(const char* op, const char* name, const ConstMatrix& x) {
  AS_CHECK(x.dtype != DType::kInt8 || (x.row_scale != nullptr && x.row_sums != nullptr))
      << op << ": " << name << " is int8 without scales";
}

// Of int8 rows of `cols` columns.
inline void CheckScaleGroup(const char* op, int64_t scale_group, int64_t cols) {
  AS_CHECK(scale_group == 0 ||
           (scale_group > 0 && scale_group % kernels::kSumBlock == 0 && cols % scale_group == 0))
      << op << ": a scale for every " << scale_group << " of " << cols << " columns";
}

// Of an op that writes int8: room for scales and sums, and a float32 row before it is quantised.
inline void CheckQuantized(const char* op, const OpContext& context, const Matrix& y) {
  CheckHas(op, context, DType::kInt8, OpKind::kQuantize);
  AS_CHECK(y.row_scale != nullptr && y.row_sums != nullptr)
      << op << ": an int8 result without room for its scales";
  CheckScaleGroup(op, y.scale_group, y.cols);
}
inline void CheckRowScratch(const char* op, const OpContext& context, int64_t cols) {
  AS_CHECK(context.row_scratch.data != nullptr && context.row_scratch.floats >= cols)
      << op << ": a scratch row of " << context.row_scratch.floats << " elements for " << cols;
}

inline void CheckKvLayer(const char* op, const KvLayer& kv) {
  const KvShape& shape = kv.shape();
  AS_CHECK(kv.pool.data != nullptr) << op << ": no KV pool";
  AS_CHECK(kv.layer >= 0 && kv.layer < shape.num_layers)
      << op << ": layer " << kv.layer << " of " << shape.num_layers;
  AS_CHECK(shape.block_size >= kernels::kLeastBlockSize &&
           kernels::kAttentionChunk % shape.block_size == 0)
      << op << ": block_size is " << shape.block_size << "; it must divide "
      << kernels::kAttentionChunk << " and be " << kernels::kLeastBlockSize << " or more";
}

}  // namespace allspark::internal
