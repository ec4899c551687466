#include "ops/gather_columns.h"

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
  internal::CheckInt8Scales("gather_columns", "x", x);
  internal::CheckInt8Scales("gather_columns", "y", y);
  AS_CHECK(x.scale_group == 0 && y.scale_group == 0)
      << "gather_columns: columns with scales of their own cannot change their places";
  internal::CheckHas("gather_columns", context, x.dtype, OpKind::kGatherColumns, x.dtype);
  context.ops->GatherColumns(x, order, y);
}

}  // namespace allspark
