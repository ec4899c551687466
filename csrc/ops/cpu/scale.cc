#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {

void CpuOps::Scale(const ConstMatrix& x, const Scaling& scaling, bool accumulate, const Matrix& y) {
  pool_.ParallelFor(x.rows, cpu::RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
    kernels::ScaleArgs args{};
    args.x = static_cast<const float*>(cpu::RowAt(x, begin));
    args.ldx = x.ld;
    args.y = static_cast<float*>(cpu::RowAt(y, begin));
    args.ldy = y.ld;
    args.rows = end - begin;
    args.cols = x.cols;
    args.scale = scaling.scale;
    args.soft_cap = scaling.soft_cap;
    args.limit = scaling.limit;
    args.accumulate = accumulate;
    kernels_.scale(args);
  });
}

}  // namespace allspark
