#include "ops/convert.h"

#include "ops/op_check.h"

namespace allspark {
namespace internal {

void ConvertRows(const char* op, const OpContext& context, const ConstMatrix& x, const Matrix& y) {
  const auto kernel = context.kernels->convert[Slot(x.dtype)][Slot(y.dtype)];
  CheckKernel(op, y.dtype, kernel != nullptr, context);
  kernel({x.data, x.ld, y.data, y.ld, x.rows, x.cols, x.row_scale, x.scale_group}, context.stream);
}

}  // namespace internal

void Convert(const OpContext& context, const ConstMatrix& x, const Matrix& y) {
  const OpTimer timer(context.profile, Op::kConvert);
  internal::CheckMatrix("convert", "x", x);
  internal::CheckMatrix("convert", "y", y);
  internal::CheckSameShape("convert", x, y);
  context.pool->ParallelFor(x.rows, internal::RowGrain(x.cols),
                            [&](int64_t begin, int64_t end, int) {
                              ConstMatrix from = x;
                              from.data = internal::RowAt(x, begin);
                              from.rows = end - begin;
                              if (x.scale_group > 0) from.row_scale += begin * x.num_scales();
                              Matrix to = y;
                              to.data = internal::RowAt(y, begin);
                              internal::ConvertRows("convert", context, from, to);
                            });
}

}  // namespace allspark
