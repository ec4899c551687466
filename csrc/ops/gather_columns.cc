#include "ops/gather_columns.h"

#include <algorithm>

#include "ops/op_check.h"

namespace allspark {

void GatherColumns(const OpContext& context, const ConstMatrix& x, const int32_t* order,
                   const Matrix& y) {
  const OpTimer timer(context.profile, Op::kGather);
  internal::CheckMatrix("gather_columns", "x", x);
  internal::CheckMatrix("gather_columns", "y", y);
  internal::CheckDType("gather_columns", "y", y.dtype, x.dtype);
  internal::CheckSameShape("gather_columns", x, y);
  AS_CHECK(order != nullptr) << "gather_columns: there is no order";
  const bool quantized = x.dtype == DType::kInt8;
  AS_CHECK(!quantized ||
           (x.row_scale != nullptr && y.row_scale != nullptr && y.row_sums != nullptr))
      << "gather_columns: int8 rows without scales";
  AS_CHECK(x.scale_group == 0 && y.scale_group == 0)
      << "gather_columns: columns with scales of their own cannot change their places";
  const auto kernel = context.kernels->gather_columns[internal::Slot(x.dtype)];
  internal::CheckKernel("gather_columns", x.dtype, kernel != nullptr, context);
  context.pool->ParallelFor(
      x.rows, internal::RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
        kernels::GatherColumnsArgs args{};
        args.x = internal::RowAt(x, begin);
        args.ldx = x.ld;
        args.order = order;
        args.y = internal::RowAt(y, begin);
        args.ldy = y.ld;
        args.rows = end - begin;
        args.cols = x.cols;
        if (quantized) {
          std::copy(x.row_scale + begin, x.row_scale + end, y.row_scale + begin);
          args.sums = y.row_sums + begin * kernels::RowSums(x.cols);
        }
        kernel(args, context.stream);
      });
}

}  // namespace allspark
