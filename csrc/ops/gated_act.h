// GatedAct: the activation of a gated MLP, act(gate) * up. Splits over rows.
#pragma once

#include "ops/op_context.h"

namespace allspark {

// x: [rows, 2 * cols] float32, gate then up; out: [rows, cols].
void GatedAct(const OpContext& context, kernels::Activation activation, const ConstMatrix& x,
              const Matrix& out);

}  // namespace allspark
