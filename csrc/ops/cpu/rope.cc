#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {

void CpuOps::Rope(const Matrix& x, int64_t heads, int64_t head_dim, const int32_t* positions,
                  const RopeView& rope) {
  pool_.ParallelFor(x.rows, cpu::RowGrain(heads * head_dim), [&](int64_t begin, int64_t end, int) {
    kernels::RopeArgs args{};
    args.x = static_cast<float*>(cpu::RowAt(x, begin));
    args.ldx = x.ld;
    args.positions = positions + begin;
    args.cos_sin = rope.cos_sin;
    args.rows = end - begin;
    args.heads = heads;
    args.head_dim = head_dim;
    args.rotary_dim = rope.rotary_dim;
    args.interleaved = rope.interleaved;
    kernels_.rope(args);
  });
}

}  // namespace allspark
