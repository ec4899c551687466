#include "ops/argmax.h"

#include <limits>

#include "ops/op_check.h"

namespace allspark {

void ArgMax(const OpContext& context, const ConstMatrix& x, int32_t* index) {
  internal::CheckMatrix("argmax", "x", x);
  internal::CheckDType("argmax", "x", x.dtype, DType::kFloat32);
  AS_CHECK(x.cols <= std::numeric_limits<int32_t>::max())
      << "argmax: x has " << x.cols << " columns; an index is an int32";
  internal::CheckKernel("argmax", x.dtype, context.kernels->argmax != nullptr, context);
  context.pool->ParallelFor(x.rows, internal::RowGrain(x.cols),
                            [&](int64_t begin, int64_t end, int) {
                              kernels::ArgMaxArgs args{};
                              args.x = static_cast<const float*>(internal::RowAt(x, begin));
                              args.ldx = x.ld;
                              args.rows = end - begin;
                              args.cols = x.cols;
                              args.index = index + begin;
                              context.kernels->argmax(args, context.stream);
                            });
}

}  // namespace allspark
