#include "ops/quantize.h"

#include "ops/op_check.h"

namespace allspark {

void Quantize(const OpContext& context, const ConstMatrix& x, const Matrix& q) {
  const OpTimer timer(context.profile, Op::kQuantize);
  internal::CheckFloats("quantize", "x", x);
  internal::CheckMatrix("quantize", "q", q);
  internal::CheckDType("quantize", "q", q.dtype, DType::kInt8);
  internal::CheckQuantized("quantize", context, q);
  internal::CheckSameShape("quantize", x, q, "q");
  context.ops->Quantize(x, q);
}

}  // namespace allspark
