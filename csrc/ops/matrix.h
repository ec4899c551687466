// The matrices that ops read and write: where they lie in the device's memory, and their shapes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "kernels/args.h"
#include "tensor/tensor_view.h"

namespace allspark {

// group_size 0: the weight is not quantised.
using kernels::WeightScales;

inline bool IsQuantized(DType weight) {
  return weight == DType::kUInt8 || weight == DType::kUInt4 || weight == DType::kFloat8E4M3;
}

// How a product reads its input. Implicit from a dtype.
struct InputFormat {
  DType dtype = DType::kUndefined;
  int64_t scale_group = 0;  // int8 only: columns per scale (kernels/args.h); 0: a scale per row

  InputFormat() = default;
  InputFormat(DType type, int64_t group = 0) : dtype(type), scale_group(group) {}  // NOLINT
  bool operator==(const InputFormat&) const = default;
};

// A row-major matrix that an op reads: [rows, cols], `ld` elements from one row to the next.
struct ConstMatrix {
  const void* data = nullptr;
  DType dtype = DType::kUndefined;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t ld = 0;
  // int8 only: the scales of each row, [rows][num_scales()], and its sums,
  // [rows][kernels::RowSums(cols)].
  const float* row_scale = nullptr;
  const int32_t* row_sums = nullptr;
  int64_t scale_group = 0;  // columns per scale; 0: one scale for each row

  int64_t num_scales() const { return kernels::RowScales(cols, scale_group); }
  InputFormat format() const { return {dtype, scale_group}; }
};

// The same for a matrix that an op writes.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::kUndefined;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t ld = 0;
  float* row_scale = nullptr;
  int32_t* row_sums = nullptr;
  int64_t scale_group = 0;

  int64_t num_scales() const { return kernels::RowScales(cols, scale_group); }
  InputFormat format() const { return {dtype, scale_group}; }
  operator ConstMatrix() const {  // NOLINT: implicit.
    return {data, dtype, rows, cols, ld, row_scale, row_sums, scale_group};
  }
};

// Input of a GEMM: room for [rows, cols] in any of its possible dtypes, and for the scales and sums
// of int8 rows.
struct ActivationBuffer {
  Matrix room;  // in the widest dtype

  Matrix As(const InputFormat& format) const {
    return {room.data, format.dtype,   room.rows,     room.cols,
            room.ld,   room.row_scale, room.row_sums, format.scale_group};
  }
};

// Rows [begin, end) of a matrix, with their scales and sums.
template <typename M>
M RowsOf(M x, int64_t begin, int64_t end) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(x.data)>>,
                                  const unsigned char, unsigned char>;
  x.data = static_cast<Byte*>(x.data) + begin * x.ld * ElementBytes(x.dtype);
  x.rows = end - begin;
  if (x.row_scale != nullptr) x.row_scale += begin * x.num_scales();
  if (x.row_sums != nullptr) x.row_sums += begin * kernels::RowSums(x.cols);
  return x;
}

}  // namespace allspark
