#include "ops/scale.h"

#include "ops/op_check.h"

namespace allspark {

void Scale(const OpContext& context, const ConstMatrix& x, const Scaling& scaling, bool accumulate,
           const Matrix& y) {
  const OpTimer timer(context.profile, Op::kScale);
  internal::CheckMatrix("scale", "x", x);
  internal::CheckMatrix("scale", "y", y);
  internal::CheckDType("scale", "x", x.dtype, DType::kFloat32);
  internal::CheckDType("scale", "y", y.dtype, DType::kFloat32);
  internal::CheckHas("scale", context, x.dtype, OpKind::kScale);
  internal::CheckSameShape("scale", x, y);
  context.ops->Scale(x, scaling, accumulate, y);
}

}  // namespace allspark
