// RmsNorm over whole rows, over chosen rows, and over each head of a row. Splits over rows.
#pragma once

#include "ops/op_context.h"

namespace allspark {

// y[r, :] = x[r, :] / rms(x[r, :]) * weight. x: [rows, cols] float32; weight: [cols]; y: [rows,
// cols].
void RmsNorm(const OpContext& context, const ConstMatrix& x, const float* weight, float eps,
             const Matrix& y);

// y[i, :] = norm of x[row_ids[i], :], for the y.rows rows named. Requires: 0 <= row_ids[i] <
// x.rows.
void RmsNormGather(const OpContext& context, const ConstMatrix& x, const int64_t* row_ids,
                   const float* weight, float eps, const Matrix& y);

// Normalises, in place, heads [head_begin, head_begin + num_heads) of every row; weight:
// [head_dim]. x: [rows, heads * head_dim] float32.
void RmsNormHeads(const OpContext& context, const Matrix& x, int64_t head_begin, int64_t num_heads,
                  int64_t head_dim, const float* weight, float eps);

}  // namespace allspark
