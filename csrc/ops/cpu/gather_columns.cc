#include <algorithm>

#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {

void CpuOps::GatherColumns(const ConstMatrix& x, const int32_t* order, const Matrix& y) {
  const auto kernel = kernels_.gather_columns[cpu::Slot(x.dtype)];
  pool_.ParallelFor(x.rows, cpu::RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
    kernels::GatherColumnsArgs args{};
    args.x = cpu::RowAt(x, begin);
    args.ldx = x.ld;
    args.order = order;
    args.y = cpu::RowAt(y, begin);
    args.ldy = y.ld;
    args.rows = end - begin;
    args.cols = x.cols;
    if (x.dtype == DType::kInt8) {
      std::copy(x.row_scale + begin, x.row_scale + end, y.row_scale + begin);
      args.sums = y.row_sums + begin * kernels::RowSums(x.cols);
    }
    kernel(args);
  });
}

}  // namespace allspark
