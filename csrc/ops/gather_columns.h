// GatherColumns: the columns of a matrix in another order.
#pragma once

#include "ops/op_context.h"

namespace allspark {

// y[r, j] = x[r, order[j]]. x, y: [rows, cols] of one dtype (float32, bfloat16 or int8); they do
// not overlap. order: [cols], a permutation. An int8 row keeps its scale.
void GatherColumns(const OpContext& context, const ConstMatrix& x, const int32_t* order,
                   const Matrix& y);

}  // namespace allspark
