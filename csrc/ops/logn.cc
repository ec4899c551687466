#include "ops/logn.h"

#include "ops/op_check.h"

namespace allspark {

void LogN(const OpContext& context, const int32_t* positions, int64_t trained_length,
          const Matrix& x) {
  const OpTimer timer(context.profile, Op::kScale);
  internal::CheckFloats("logn", "x", x);
  internal::CheckHas("logn", context, x.dtype, OpKind::kScale);
  AS_CHECK(positions != nullptr) << "logn: no positions";
  AS_CHECK(trained_length > 1) << "logn: trained_length is " << trained_length;
  context.ops->LogN(positions, trained_length, x);
}

}  // namespace allspark
