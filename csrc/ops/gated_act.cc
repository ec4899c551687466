#include "ops/gated_act.h"

#include "ops/op_check.h"

namespace allspark {
namespace {

void Run(const OpContext& context, kernels::Activation activation, bool gated, const ConstMatrix& x,
         const Matrix& out) {
  const OpTimer timer(context.profile, Op::kActivation);
  internal::CheckFloats("gated_act", "x", x);
  internal::CheckMatrix("gated_act", "out", out);
  AS_CHECK(x.cols == (gated ? 2 : 1) * out.cols && x.rows == out.rows)
      << "gated_act: x is [" << x.rows << ", " << x.cols << "], out is [" << out.rows << ", "
      << out.cols << "]; x holds " << (gated ? "gate and up" : "up alone");
  const bool quantize = out.dtype == DType::kInt8;
  if (quantize) internal::CheckQuantized("gated_act", context, out);
  const DType dtype = quantize ? DType::kFloat32 : out.dtype;
  internal::CheckHas("gated_act", context, dtype, OpKind::kGatedAct, dtype);
  if (quantize) internal::CheckRowScratch("gated_act", context, out.cols);
  context.ops->GatedAct(activation, gated, x, context.row_scratch, out);
}

}  // namespace

void GatedAct(const OpContext& context, kernels::Activation activation, const ConstMatrix& x,
              const Matrix& out) {
  Run(context, activation, /*gated=*/true, x, out);
}

void Activate(const OpContext& context, kernels::Activation activation, const ConstMatrix& x,
              const Matrix& out) {
  Run(context, activation, /*gated=*/false, x, out);
}

}  // namespace allspark
