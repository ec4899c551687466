#include "ops/hadamard.h"

#include <algorithm>

#include "ops/op_check.h"

namespace allspark {

int64_t HadamardSize(int64_t head_dim) {
  return std::min(head_dim & -head_dim, kernels::kMostHadamard);
}

void Hadamard(const OpContext& context, const ConstMatrix& x, int64_t head_dim, const Matrix& y) {
  const OpTimer timer(context.profile, Op::kHadamard);
  internal::CheckMatrix("hadamard", "x", x);
  internal::CheckMatrix("hadamard", "y", y);
  internal::CheckDType("hadamard", "x", x.dtype, DType::kFloat32);
  internal::CheckDType("hadamard", "y", y.dtype, DType::kFloat32);
  internal::CheckKernel("hadamard", x.dtype, context.kernels->hadamard != nullptr, context);
  internal::CheckSameShape("hadamard", x, y);
  AS_CHECK(head_dim > 0 && x.cols % head_dim == 0)
      << "hadamard: heads of " << head_dim << " elements; x has " << x.cols << " columns";
  context.pool->ParallelFor(x.rows, internal::RowGrain(8 * x.cols),
                            [&](int64_t begin, int64_t end, int) {
                              kernels::HadamardArgs args{};
                              args.x = static_cast<const float*>(internal::RowAt(x, begin));
                              args.ldx = x.ld;
                              args.y = static_cast<float*>(internal::RowAt(y, begin));
                              args.ldy = y.ld;
                              args.rows = end - begin;
                              args.cols = x.cols;
                              args.size = HadamardSize(head_dim);
                              context.kernels->hadamard(args, context.stream);
                            });
}

}  // namespace allspark
