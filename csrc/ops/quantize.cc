#include "ops/quantize.h"

#include "ops/op_check.h"

namespace allspark {
namespace internal {

void CheckQuantized(const char* op, const OpContext& context, const Matrix& y) {
  CheckKernel(op, DType::kInt8, context.kernels->quantize != nullptr, context);
  AS_CHECK(y.row_scale != nullptr && y.row_sums != nullptr)
      << op << ": an int8 result without room for its scales";
  CheckScaleGroup(op, y.scale_group, y.cols);
}

float* ScratchRow(const char* op, const OpContext& context, int64_t cols, int thread_id) {
  AS_CHECK(context.row_scratch != nullptr && context.row_scratch_floats >= cols)
      << op << ": a scratch row of " << context.row_scratch_floats << " elements for " << cols;
  return context.row_scratch + thread_id * context.row_scratch_floats;
}

void QuantizeRows(const OpContext& context, const float* x, int64_t ldx, const Matrix& q,
                  int64_t begin, int64_t end) {
  kernels::QuantizeArgs args{};
  args.x = x;
  args.ldx = ldx;
  args.q = static_cast<int8_t*>(RowAt(q, begin));
  args.ldq = q.ld;
  args.scale = q.row_scale + begin * q.num_scales();
  args.sums = q.row_sums + begin * kernels::RowSums(q.cols);
  args.rows = end - begin;
  args.cols = q.cols;
  args.scale_group = q.scale_group;
  context.kernels->quantize(args, context.stream);
}

}  // namespace internal

void Quantize(const OpContext& context, const ConstMatrix& x, const Matrix& q) {
  const OpTimer timer(context.profile, Op::kQuantize);
  internal::CheckMatrix("quantize", "x", x);
  internal::CheckMatrix("quantize", "q", q);
  internal::CheckDType("quantize", "x", x.dtype, DType::kFloat32);
  internal::CheckDType("quantize", "q", q.dtype, DType::kInt8);
  internal::CheckQuantized("quantize", context, q);
  AS_CHECK(x.rows == q.rows && x.cols == q.cols) << "quantize: x is [" << x.rows << ", " << x.cols
                                                 << "], q is [" << q.rows << ", " << q.cols << "]";
  context.pool->ParallelFor(
      x.rows, internal::RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
        internal::QuantizeRows(context, static_cast<const float*>(internal::RowAt(x, begin)), x.ld,
                               q, begin, end);
      });
}

}  // namespace allspark
