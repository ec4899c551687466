// Linear: y (+)= x * w^T (+ bias) over packed weights.
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
  const float* bias = nullptr;  // [n] or null
  WeightScales scales = {};     // of quantised weights
  InputFormat input = {};       // of x; kUndefined: any that the kernel table supports
  Op op = Op::kLinear;          // how a profile counts this product
  // [k], for weights with reordered columns: column j belongs to x's column order[j]. Callers pass
  // x in that order already (ops/gather_columns.h).
  const int32_t* order = nullptr;
};

// The i-th of `count` weights that lie one after the other in `all`, as those of experts do. Each
// has whole panels.
LinearWeight WeightOf(const LinearWeight& all, int64_t count, int64_t i);

// x: [rows, w.k] in a dtype that the kernel table pairs with the weight's: the same, or for
// quantised weights float32, bfloat16 or int8. y: [rows, w.n] float32; `accumulate` adds to y.
// `low_rank`: the adapters' products (ops/lora.h).
void Linear(const OpContext& context, const ConstMatrix& x, const LinearWeight& w, bool accumulate,
            const Matrix& y, std::span<const kernels::LowRank> low_rank = {});

// The activation of a gated MLP, act(gate) * up. The weight's rows are gate, then up. Same bits as
// Linear, then GatedAct; but gate and up are not written to memory if the kernel table can do that
// and both are whole panels. scratch: [rows, w.n] float32; y: [rows, w.n / 2] float32, bfloat16 or
// int8.
void LinearGated(const OpContext& context, const ConstMatrix& x, const LinearWeight& w,
                 kernels::Activation activation, const Matrix& scratch, const Matrix& y,
                 std::span<const kernels::LowRank> low_rank = {});

// The same for an MLP without a gate: act(x * w^T + bias). y: [rows, w.n].
void LinearActivated(const OpContext& context, const ConstMatrix& x, const LinearWeight& w,
                     kernels::Activation activation, const Matrix& scratch, const Matrix& y,
                     std::span<const kernels::LowRank> low_rank = {});

}  // namespace allspark
