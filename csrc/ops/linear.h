// Linear: y (+)= x * w^T (+ bias) over packed weights. Splits over panels of output columns, and
// over rows too when there are more threads than panels keep busy.
#pragma once

#include <span>

#include "ops/op_context.h"

namespace allspark {

// A GEMM weight [n, k] in the PANEL64 layout (kernels/args.h), its scales and its bias.
struct LinearWeight {
  const void* data = nullptr;
  DType dtype = DType::kUndefined;
  int64_t n = 0;
  int64_t k = 0;
  const float* bias = nullptr;           // [n] or null
  WeightScales scales = {};              // of uint8 and uint4 weights
  DType activation = DType::kUndefined;  // of x; kUndefined: whatever the kernel table takes
  Op op = Op::kLinear;                   // what a profile counts it as
  // [k], of weights whose columns have another order: column j is of x's column order[j]. x is in
  // that order already when it comes here (ops/gather_columns.h).
  const int32_t* order = nullptr;
};

// How the work of one Linear is cut: row_parts x panel_parts rectangles, one per thread.
struct LinearSplit {
  int64_t row_parts = 1;
  int64_t panel_parts = 1;
};
LinearSplit SplitLinear(int64_t rows, int64_t panels, int64_t num_threads);

// x: [rows, w.k] in a dtype that the kernel table pairs with the weight's: the same, or for
// quantised weights float32, bfloat16 or int8; y: [rows, w.n] float32. `accumulate` adds to what y
// holds. `low_rank`: what adapters add to the products (ops/lora.h).
void Linear(const OpContext& context, const ConstMatrix& x, const LinearWeight& w, bool accumulate,
            const Matrix& y, std::span<const kernels::LowRank> low_rank = {});

// The activation of a gated MLP, act(gate) * up, over a weight whose rows are gate, then up: the
// bits of Linear and GatedAct, without writing gate and up to memory where the kernel table and
// whole panels allow it. scratch: [rows, w.n] float32; y: [rows, w.n / 2] float32, bfloat16 or
// int8.
void LinearGated(const OpContext& context, const ConstMatrix& x, const LinearWeight& w,
                 kernels::Activation activation, const Matrix& scratch, const Matrix& y,
                 std::span<const kernels::LowRank> low_rank = {});

// The same of an MLP without a gate: act(x * w^T + bias). y: [rows, w.n].
void LinearActivated(const OpContext& context, const ConstMatrix& x, const LinearWeight& w,
                     kernels::Activation activation, const Matrix& scratch, const Matrix& y,
                     std::span<const kernels::LowRank> low_rank = {});

}  // namespace allspark
