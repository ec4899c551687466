// Convert: rows of float32 rounded to another dtype.
#pragma once

#include "ops/op_context.h"

namespace allspark {

// y = x, rounded to nearest even. x: [rows, cols] float32; y: [rows, cols] bfloat16.
void Convert(const OpContext& context, const ConstMatrix& x, const Matrix& y);

}  // namespace allspark
