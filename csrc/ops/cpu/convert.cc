#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {
namespace cpu {

void ConvertRows(const kernels::KernelTable& kernels, const ConstMatrix& x, const Matrix& y) {
  kernels.convert[Slot(x.dtype)][Slot(y.dtype)]({x.data, x.ld, y.data, y.ld, x.rows, x.cols});
}

}  // namespace cpu

void CpuOps::Convert(const ConstMatrix& x, const Matrix& y) {
  pool_.ParallelFor(x.rows, cpu::RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
    cpu::ConvertRows(kernels_, RowsOf(x, begin, end), RowsOf(y, begin, end));
  });
}

}  // namespace allspark
