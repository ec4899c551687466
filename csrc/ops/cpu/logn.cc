#include <cmath>

#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {

void CpuOps::LogN(const int32_t* positions, int64_t trained_length, const Matrix& x) {
  const double log_trained = std::log(static_cast<double>(trained_length));
  pool_.ParallelFor(x.rows, cpu::RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t length = int64_t{positions[row]} + 1;
      if (length <= trained_length) continue;
      kernels::ScaleArgs args{};
      args.y = static_cast<float*>(cpu::RowAt(x, row));
      args.x = args.y;
      args.ldx = args.ldy = x.ld;
      args.rows = 1;
      args.cols = x.cols;
      args.scale = static_cast<float>(std::log(static_cast<double>(length)) / log_trained);
      kernels_.scale(args);
    }
  });
}

}  // namespace allspark
