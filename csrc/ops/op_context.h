// What every op needs besides its operands, and the matrix views that operands come as. Ops check
// shapes and dtypes (AS_CHECK: user input was checked long before), split the work over the pool
// statically and call the table's kernel. They allocate nothing. A split never changes a bit of the
// result: each output element is computed whole by one kernel call. The step thread calls them.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "kernels/kernel_table.h"
#include "memory/step_arena.h"
#include "platform/thread_pool.h"

namespace allspark {

struct OpContext {
  const kernels::KernelTable* kernels = nullptr;
  ThreadPool* pool = nullptr;
  StepArena* arena = nullptr;  // where the caller of ops takes scratch; ops are handed theirs
  kernels::Stream stream = nullptr;
};

// A row-major matrix that an op reads: [rows, cols], `ld` elements from one row to the next.
struct ConstMatrix {
  const void* data = nullptr;
  DType dtype = DType::kUndefined;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t ld = 0;
};

// The same, written to.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::kUndefined;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t ld = 0;

  operator ConstMatrix() const { return {data, dtype, rows, cols, ld}; }  // NOLINT: implicit.
};

}  // namespace allspark
