#include "ops/rms_norm.h"

#include "ops/op_check.h"

namespace allspark {
namespace {

void CheckNorm(const OpContext& context, const ConstMatrix& x, const float* weight,
               const Matrix& y) {
  internal::CheckMatrix("rms_norm", "x", x);
  internal::CheckMatrix("rms_norm", "y", y);
  internal::CheckDType("rms_norm", "x", x.dtype, DType::kFloat32);
  AS_CHECK(weight != nullptr) << "rms_norm: no weight";
  AS_CHECK(x.cols == y.cols) << "rms_norm: x has " << x.cols << " columns, y has " << y.cols;
  internal::CheckKernel("rms_norm", y.dtype,
                        context.kernels->rms_norm[internal::Slot(y.dtype)] != nullptr, context);
}

kernels::RmsNormArgs NormArgs(const ConstMatrix& x, const float* weight, float eps,
                              const Matrix& y) {
  kernels::RmsNormArgs args{};
  args.x = static_cast<const float*>(x.data);
  args.ldx = x.ld;
  args.weight = weight;
  args.y = y.data;
  args.ldy = y.ld;
  args.rows = x.rows;
  args.cols = x.cols;
  args.eps = eps;
  return args;
}

}  // namespace

void RmsNorm(const OpContext& context, const ConstMatrix& x, const float* weight, float eps,
             const Matrix& y) {
  CheckNorm(context, x, weight, y);
  AS_CHECK(x.rows == y.rows) << "rms_norm: x has " << x.rows << " rows, y has " << y.rows;
  const auto kernel = context.kernels->rms_norm[internal::Slot(y.dtype)];
  context.pool->ParallelFor(x.rows, internal::RowGrain(x.cols),
                            [&](int64_t begin, int64_t end, int) {
                              kernels::RmsNormArgs args = NormArgs(x, weight, eps, y);
                              args.x = static_cast<const float*>(internal::RowAt(x, begin));
                              args.y = internal::RowAt(y, begin);
                              args.rows = end - begin;
                              kernel(args, context.stream);
                            });
}

void RmsNormGather(const OpContext& context, const ConstMatrix& x, const int64_t* row_ids,
                   const float* weight, float eps, const Matrix& y) {
  CheckNorm(context, x, weight, y);
  for (int64_t i = 0; i < y.rows; ++i) {
    AS_CHECK(row_ids[i] >= 0 && row_ids[i] < x.rows)
        << "rms_norm: row " << row_ids[i] << " wanted; x has " << x.rows << " rows";
  }
  const auto kernel = context.kernels->rms_norm[internal::Slot(y.dtype)];
  context.pool->ParallelFor(y.rows, internal::RowGrain(x.cols),
                            [&](int64_t begin, int64_t end, int) {
                              kernels::RmsNormArgs args = NormArgs(x, weight, eps, y);
                              args.rows = 1;
                              for (int64_t i = begin; i < end; ++i) {
                                args.x = static_cast<const float*>(internal::RowAt(x, row_ids[i]));
                                args.y = internal::RowAt(y, i);
                                kernel(args, context.stream);
                              }
                            });
}

void RmsNormHeads(const OpContext& context, const Matrix& x, int64_t head_begin, int64_t num_heads,
                  int64_t head_dim, const float* weight, float eps) {
  CheckNorm(context, x, weight, x);
  AS_CHECK(head_dim > 0 && head_begin >= 0 && num_heads > 0 &&
           (head_begin + num_heads) * head_dim <= x.cols)
      << "rms_norm: heads [" << head_begin << ", " << head_begin + num_heads << ") of " << head_dim
      << " elements do not lie in " << x.cols << " columns";
  const auto kernel = context.kernels->rms_norm[internal::Slot(DType::kFloat32)];
  context.pool->ParallelFor(
      x.rows, internal::RowGrain(num_heads * head_dim), [&](int64_t begin, int64_t end, int) {
        kernels::RmsNormArgs args = NormArgs(x, weight, eps, x);
        args.ldx = args.ldy = args.cols = head_dim;
        args.rows = num_heads;
        for (int64_t row = begin; row < end; ++row) {
          float* heads = static_cast<float*>(internal::RowAt(x, row)) + head_begin * head_dim;
          args.x = heads;
          args.y = heads;
          kernel(args, context.stream);
        }
      });
}

}  // namespace allspark
