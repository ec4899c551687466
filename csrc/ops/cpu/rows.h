// Rows of matrices, for ops that are cut between rows. Private to ops/cpu.
#pragma once

#include <algorithm>

#include "kernels/kernel_table.h"
#include "ops/matrix.h"
#include "ops/op_context.h"
#include "tensor/tensor_view.h"

namespace allspark::cpu {

inline int Slot(DType dtype) { return static_cast<int>(dtype); }

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

// A thread's row of the scratch memory.
inline float* RowOf(const RowScratch& scratch, int thread_id) {
  return scratch.data + thread_id * scratch.floats;
}

// Quantises rows of x into rows [begin, end) of q, on the calling thread.
void QuantizeRows(const kernels::KernelTable& kernels, const float* x, int64_t ldx, const Matrix& q,
                  int64_t begin, int64_t end);
// y = x in the dtype of y, on the calling thread.
void ConvertRows(const kernels::KernelTable& kernels, const ConstMatrix& x, const Matrix& y);

}  // namespace allspark::cpu
