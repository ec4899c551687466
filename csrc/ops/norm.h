// RMSNorm and LayerNorm over whole rows, over chosen rows, and over each head of a row.
#pragma once

#include "ops/op_context.h"

namespace allspark {

struct NormWeight {
  const float* weight = nullptr;  // [cols]; null: there is no norm
  float eps = 0.0f;
  bool centered = false;        // LayerNorm, which first subtracts the row's mean
  const float* bias = nullptr;  // [cols] or null; LayerNorm only
};

// y[r, :] = x[r, :] / rms(x[r, :]) * weight, or LayerNorm of it. x: [rows, cols] float32; y: [rows,
// cols] float32, bfloat16 or int8; float32 y may be x.
void Norm(const OpContext& context, const ConstMatrix& x, const NormWeight& norm, const Matrix& y);

// y[i, :] = norm of x[row_ids[i], :], for the y.rows rows in row_ids. Requires: 0 <= row_ids[i] <
// x.rows.
void NormGather(const OpContext& context, const ConstMatrix& x, const int64_t* row_ids,
                const NormWeight& norm, const Matrix& y);

// Normalises, in place, heads [head_begin, head_begin + num_heads) of every row; weight:
// [head_dim]. x: [rows, heads * head_dim] float32.
void NormHeads(const OpContext& context, const Matrix& x, int64_t head_begin, int64_t num_heads,
               int64_t head_dim, const NormWeight& norm);

}  // namespace allspark
