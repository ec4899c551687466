// The context that every op needs besides its operands, and the matrix views of operands. Ops check
// shapes and dtypes (AS_CHECK: user input was checked long before), cut the work into parts,
// independently of timing, and call the table's kernel for each on the pool. They allocate nothing.
// A cut never changes a bit of the result: one kernel call computes an output element whole, or
// attention merges partial results in a fixed order (ops/attention.h). The step thread calls ops.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "kernels/kernel_table.h"
#include "memory/step_arena.h"
#include "ops/input_observer.h"
#include "ops/op_profile.h"
#include "platform/thread_pool.h"

namespace allspark {

struct OpContext {
  const kernels::KernelTable* kernels = nullptr;
  ThreadPool* pool = nullptr;
  StepArena* arena = nullptr;  // the callers of ops take scratch here; ops get theirs passed
  kernels::Stream stream = nullptr;
  // For ops that write int8: a float32 row per thread, this many elements apart.
  float* row_scratch = nullptr;
  int64_t row_scratch_floats = 0;
  OpProfile* profile = nullptr;       // null: no profiling
  InputObserver* observer = nullptr;  // null: nobody looks at the inputs of products
};

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

}  // namespace allspark
