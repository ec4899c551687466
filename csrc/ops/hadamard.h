// Hadamard: heads times a Hadamard matrix, which spreads what few of their elements hold.
#pragma once

#include "ops/op_context.h"

namespace allspark {

// The size of the matrix for heads of this many elements: the largest power of two that divides it,
// up to kernels::kMostHadamard. 1: none.
int64_t HadamardSize(int64_t head_dim);

// y = every HadamardSize(head_dim) columns of x times the matrix of that size, divided by its root:
// products of two heads that are both multiplied stay what they are. x, y: [rows, heads * head_dim]
// float32; y may be x.
void Hadamard(const OpContext& context, const ConstMatrix& x, int64_t head_dim, const Matrix& y);

}  // namespace allspark
