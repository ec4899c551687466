#include "ops/argmax.h"

#include <limits>

#include "ops/op_check.h"

namespace allspark {

void ArgMax(const OpContext& context, const ConstMatrix& x, int32_t* index) {
  internal::CheckFloats("argmax", "x", x);
  AS_CHECK(x.cols <= std::numeric_limits<int32_t>::max())
      << "argmax: x has " << x.cols << " columns; an index is an int32";
  internal::CheckHas("argmax", context, x.dtype, OpKind::kArgMax);
  context.ops->ArgMax(x, index);
}

}  // namespace allspark
