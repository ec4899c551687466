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
  internal::CheckKernel("scale", x.dtype, context.kernels->scale != nullptr, context);
  internal::CheckSameShape("scale", x, y);
  context.pool->ParallelFor(x.rows, internal::RowGrain(x.cols),
                            [&](int64_t begin, int64_t end, int) {
                              kernels::ScaleArgs args{};
                              args.x = static_cast<const float*>(internal::RowAt(x, begin));
                              args.ldx = x.ld;
                              args.y = static_cast<float*>(internal::RowAt(y, begin));
                              args.ldy = y.ld;
                              args.rows = end - begin;
                              args.cols = x.cols;
                              args.scale = scaling.scale;
                              args.soft_cap = scaling.soft_cap;
                              args.limit = scaling.limit;
                              args.accumulate = accumulate;
                              context.kernels->scale(args, context.stream);
                            });
}

}  // namespace allspark
