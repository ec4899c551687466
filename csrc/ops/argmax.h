// ArgMax: the lowest index of the highest value of each row.
#pragma once

#include "ops/op_context.h"

namespace allspark {

// x: [rows, cols] float32; index: [rows].
void ArgMax(const OpContext& context, const ConstMatrix& x, int32_t* index);

}  // namespace allspark
