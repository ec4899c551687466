#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {

void CpuOps::Hadamard(const ConstMatrix& x, int64_t size, const Matrix& y) {
  pool_.ParallelFor(x.rows, cpu::RowGrain(8 * x.cols), [&](int64_t begin, int64_t end, int) {
    kernels::HadamardArgs args{};
    args.x = static_cast<const float*>(cpu::RowAt(x, begin));
    args.ldx = x.ld;
    args.y = static_cast<float*>(cpu::RowAt(y, begin));
    args.ldy = y.ld;
    args.rows = end - begin;
    args.cols = x.cols;
    args.size = size;
    kernels_.hadamard(args);
  });
}

}  // namespace allspark
