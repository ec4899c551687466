// GatedAct and Activate: the activation of an MLP, act(gate) * up with a gate, act(up) without.
#pragma once

#include "ops/op_context.h"

namespace allspark {

// x: [rows, 2 * cols] float32, gate then up; out: [rows, cols].
void GatedAct(const OpContext& context, kernels::Activation activation, const ConstMatrix& x,
              const Matrix& out);
// out = act(x). x: [rows, cols] float32; out: [rows, cols].
void Activate(const OpContext& context, kernels::Activation activation, const ConstMatrix& x,
              const Matrix& out);

}  // namespace allspark
