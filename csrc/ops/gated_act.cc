#include "ops/gated_act.h"

#include "ops/op_check.h"

namespace allspark {
namespace {

void Run(const OpContext& context, kernels::Activation activation, bool gated, const ConstMatrix& x,
         const Matrix& out) {
  const OpTimer timer(context.profile, Op::kActivation);
  internal::CheckMatrix("gated_act", "x", x);
  internal::CheckMatrix("gated_act", "out", out);
  internal::CheckDType("gated_act", "x", x.dtype, DType::kFloat32);
  AS_CHECK(x.cols == (gated ? 2 : 1) * out.cols && x.rows == out.rows)
      << "gated_act: x is [" << x.rows << ", " << x.cols << "], out is [" << out.rows << ", "
      << out.cols << "]; x holds " << (gated ? "gate and up" : "up alone");
  const bool quantize = out.dtype == DType::kInt8;
  if (quantize) internal::CheckQuantized("gated_act", context, out);
  const DType dtype = quantize ? DType::kFloat32 : out.dtype;
  const auto kernel = context.kernels->gated_act[internal::Slot(dtype)];
  internal::CheckKernel("gated_act", dtype, kernel != nullptr, context);
  // An exponential costs more than the few operations per element that RowGrain assumes.
  const int64_t grain = internal::RowGrain(8 * out.cols);
  context.pool->ParallelFor(out.rows, grain, [&](int64_t begin, int64_t end, int thread_id) {
    kernels::GatedActArgs args{};
    args.x = static_cast<const float*>(internal::RowAt(x, begin));
    args.ldx = x.ld;
    args.out = internal::RowAt(out, begin);
    args.ldo = out.ld;
    args.rows = end - begin;
    args.cols = out.cols;
    args.act = activation;
    args.gated = gated;
    if (!quantize) return kernel(args, context.stream);
    float* row = internal::ScratchRow("gated_act", context, out.cols, thread_id);
    args.out = row;
    args.rows = 1;
    for (int64_t i = begin; i < end; ++i) {
      args.x = static_cast<const float*>(internal::RowAt(x, i));
      kernel(args, context.stream);
      internal::QuantizeRows(context, row, out.cols, out, i, i + 1);
    }
  });
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
