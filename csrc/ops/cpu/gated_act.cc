#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {

void CpuOps::GatedAct(kernels::Activation activation, bool gated, const ConstMatrix& x,
                      const RowScratch& scratch, const Matrix& out) {
  const bool quantize = out.dtype == DType::kInt8;
  const auto kernel = kernels_.gated_act[cpu::Slot(quantize ? DType::kFloat32 : out.dtype)];
  // An exponential costs more than the few operations per element that RowGrain assumes.
  const int64_t grain = cpu::RowGrain(8 * out.cols);
  pool_.ParallelFor(out.rows, grain, [&](int64_t begin, int64_t end, int thread_id) {
    kernels::GatedActArgs args{};
    args.x = static_cast<const float*>(cpu::RowAt(x, begin));
    args.ldx = x.ld;
    args.out = cpu::RowAt(out, begin);
    args.ldo = out.ld;
    args.rows = end - begin;
    args.cols = out.cols;
    args.act = activation;
    args.gated = gated;
    if (!quantize) return kernel(args);
    float* const row = cpu::RowOf(scratch, thread_id);
    args.out = row;
    args.rows = 1;
    for (int64_t i = begin; i < end; ++i) {
      args.x = static_cast<const float*>(cpu::RowAt(x, i));
      kernel(args);
      cpu::QuantizeRows(kernels_, row, out.cols, out, i, i + 1);
    }
  });
}

}  // namespace allspark
