#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {
namespace cpu {

void QuantizeRows(const kernels::KernelTable& kernels, const float* x, int64_t ldx, const Matrix& q,
                  int64_t begin, int64_t end) {
  kernels::QuantizeArgs args{};
  args.x = x;
  args.ldx = ldx;
  args.q = static_cast<int8_t*>(RowAt(q, begin));
  args.ldq = q.ld;
  args.scale = q.row_scale + begin * q.num_scales();
  args.sums = q.row_sums + begin * kernels::RowSums(q.cols);
  args.rows = end - begin;
  args.cols = q.cols;
  args.scale_group = q.scale_group;
  kernels.quantize(args);
}

}  // namespace cpu

void CpuOps::Quantize(const ConstMatrix& x, const Matrix& q) {
  pool_.ParallelFor(x.rows, cpu::RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
    cpu::QuantizeRows(kernels_, static_cast<const float*>(cpu::RowAt(x, begin)), x.ld, q, begin,
                      end);
  });
}

}  // namespace allspark
