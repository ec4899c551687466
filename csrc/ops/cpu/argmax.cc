#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {

void CpuOps::ArgMax(const ConstMatrix& x, int32_t* index) {
  pool_.ParallelFor(x.rows, cpu::RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
    kernels::ArgMaxArgs args{};
    args.x = static_cast<const float*>(cpu::RowAt(x, begin));
    args.ldx = x.ld;
    args.rows = end - begin;
    args.cols = x.cols;
    args.index = index + begin;
    kernels_.argmax(args);
  });
}

}  // namespace allspark
