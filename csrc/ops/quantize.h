// Quantize: rows of float32 to int8, each with a scale and sums.
#pragma once

#include "ops/op_context.h"

namespace allspark {

// q[r, :] * q.row_scale[r] ~ x[r, :]. x: [rows, cols] float32; q: [rows, cols] int8.
void Quantize(const OpContext& context, const ConstMatrix& x, const Matrix& q);

}  // namespace allspark
