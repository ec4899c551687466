#include "ops/convert.h"

#include "ops/op_check.h"

namespace allspark {

void Convert(const OpContext& context, const ConstMatrix& x, const Matrix& y) {
  const OpTimer timer(context.profile, Op::kConvert);
  internal::CheckMatrix("convert", "x", x);
  internal::CheckMatrix("convert", "y", y);
  internal::CheckSameShape("convert", x, y);
  internal::CheckHas("convert", context, y.dtype, OpKind::kConvert, x.dtype, y.dtype);
  context.ops->Convert(x, y);
}

}  // namespace allspark
