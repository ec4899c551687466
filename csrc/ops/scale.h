// Scale: rows times a number, optionally bounded by a soft cap or a limit.
#pragma once

#include "ops/op_context.h"

namespace allspark {

// The result for a value x: scale * x, or cap * tanh(scale * x / cap) with a cap; then clamped to
// [-limit, limit] with a limit.
struct Scaling {
  float scale = 1.0f;
  float soft_cap = 0.0f;  // 0: none
  float limit = 0.0f;     // 0: none

  bool is_identity() const { return scale == 1.0f && soft_cap == 0.0f && limit == 0.0f; }
};

// y = scaling(x), or y += scaling(x). x, y: [rows, cols] float32; y may be x.
void Scale(const OpContext& context, const ConstMatrix& x, const Scaling& scaling, bool accumulate,
           const Matrix& y);

}  // namespace allspark
