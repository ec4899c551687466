#include "ops/logn.h"

#include <cmath>

#include "ops/op_check.h"

namespace allspark {

void LogN(const OpContext& context, const int32_t* positions, int64_t trained_length,
          const Matrix& x) {
  const OpTimer timer(context.profile, Op::kScale);
  internal::CheckMatrix("logn", "x", x);
  internal::CheckDType("logn", "x", x.dtype, DType::kFloat32);
  internal::CheckKernel("logn", x.dtype, context.kernels->scale != nullptr, context);
  AS_CHECK(positions != nullptr) << "logn: no positions";
  AS_CHECK(trained_length > 1) << "logn: trained_length is " << trained_length;
  const double log_trained = std::log(static_cast<double>(trained_length));
  context.pool->ParallelFor(
      x.rows, internal::RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t length = int64_t{positions[row]} + 1;
          if (length <= trained_length) continue;
          kernels::ScaleArgs args{};
          args.y = static_cast<float*>(internal::RowAt(x, row));
          args.x = args.y;
          args.ldx = args.ldy = x.ld;
          args.rows = 1;
          args.cols = x.cols;
          args.scale = static_cast<float>(std::log(static_cast<double>(length)) / log_trained);
          context.kernels->scale(args, context.stream);
        }
      });
}

}  // namespace allspark
