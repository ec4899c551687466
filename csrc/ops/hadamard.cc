#include "ops/hadamard.h"

#include <algorithm>

#include "ops/op_check.h"

namespace allspark {

int64_t HadamardSize(int64_t head_dim) {
  return std::min(head_dim & -head_dim, kernels::kMostHadamard);
}

void Hadamard(const OpContext& context, const ConstMatrix& x, int64_t head_dim, const Matrix& y) {
  const OpTimer timer(context.profile, Op::kHadamard);
  internal::CheckFloats("hadamard", "x", x);
  internal::CheckFloats("hadamard", "y", y);
  internal::CheckHas("hadamard", context, x.dtype, OpKind::kHadamard);
  internal::CheckSameShape("hadamard", x, y);
  AS_CHECK(head_dim > 0 && x.cols % head_dim == 0)
      << "hadamard: heads of " << head_dim << " elements; x has " << x.cols << " columns";
  context.ops->Hadamard(x, HadamardSize(head_dim), y);
}

}  // namespace allspark
