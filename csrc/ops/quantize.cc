#include "ops/quantize.h"

#include "ops/op_check.h"

namespace allspark {

void Quantize(const OpContext& context, const ConstMatrix& x, const Matrix& q) {
  const OpTimer timer(context.profile, Op::kQuantize);
  internal::CheckMatrix("quantize", "x", x);
  internal::CheckMatrix("quantize", "q", q);
  internal::CheckDType("quantize", "x", x.dtype, DType::kFloat32);
  internal::CheckDType("quantize", "q", q.dtype, DType::kInt8);
  internal::CheckQuantized("quantize", context, q);
  AS_CHECK(x.rows == q.rows && x.cols == q.cols) << "quantize: x is [" << x.rows << ", " << x.cols
                                                 << "], q is [" << q.rows << ", " << q.cols << "]";
  context.ops->Quantize(x, q);
}

}  // namespace allspark
