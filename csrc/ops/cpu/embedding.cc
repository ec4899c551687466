#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {

void CpuOps::Embedding(const EmbeddingWeight& table, const int32_t* ids, bool accumulate,
                       const Matrix& out) {
  const auto kernel = kernels_.embedding[cpu::Slot(table.dtype)];
  pool_.ParallelFor(out.rows, cpu::RowGrain(out.cols), [&](int64_t begin, int64_t end, int) {
    kernels::EmbeddingArgs args{};
    args.table = table.data;
    args.packed = table.packed;
    args.ids = ids + begin;
    args.out = static_cast<float*>(cpu::RowAt(out, begin));
    args.ldo = out.ld;
    args.rows = end - begin;
    args.cols = out.cols;
    args.scales = table.scales;
    args.accumulate = accumulate;
    kernel(args);
  });
}

}  // namespace allspark
