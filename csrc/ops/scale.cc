#include "ops/scale.h"

#include "ops/op_check.h"

namespace allspark {

void Scale(const OpContext& context, const ConstMatrix& x, const Scaling& scaling, bool accumulate,
           const Matrix& y) {
  const OpTimer timer(context.profile, Op::kScale);
  internal::CheckFloats("scale", "x", x);
  internal::CheckFloats("scale", "y", y);
  internal::CheckHas("scale", context, x.dtype, OpKind::kScale);
  internal::CheckSameShape("scale", x, y);
  context.ops->Scale(x, scaling, accumulate, y);
}

}  // namespace allspark
