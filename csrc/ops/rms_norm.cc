#include "ops/rms_norm.h"

#include "ops/op_check.h"

namespace allspark {
namespace {

// What the kernel writes: an int8 result is quantised from float32.
DType KernelDType(const Matrix& y) { return y.dtype == DType::kInt8 ? DType::kFloat32 : y.dtype; }

void CheckNorm(const OpContext& context, const ConstMatrix& x, const float* weight,
               const Matrix& y) {
  internal::CheckMatrix("rms_norm", "x", x);
  internal::CheckMatrix("rms_norm", "y", y);
  internal::CheckDType("rms_norm", "x", x.dtype, DType::kFloat32);
  AS_CHECK(weight != nullptr) << "rms_norm: no weight";
  AS_CHECK(x.cols == y.cols) << "rms_norm: x has " << x.cols << " columns, y has " << y.cols;
  const DType dtype = KernelDType(y);
  internal::CheckKernel("rms_norm", dtype,
                        context.kernels->rms_norm[internal::Slot(dtype)] != nullptr, context);
  if (y.dtype == DType::kInt8) internal::CheckQuantized("rms_norm", context, y);
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

// The norm of row `from` of x as row `to` of y.
void NormRow(const OpContext& context, const ConstMatrix& x, int64_t from,
             kernels::RmsNormArgs args, const Matrix& y, int64_t to, int thread_id) {
  args.x = static_cast<const float*>(internal::RowAt(x, from));
  args.rows = 1;
  const bool quantize = y.dtype == DType::kInt8;
  float* row = quantize ? internal::ScratchRow("rms_norm", context, y.cols, thread_id) : nullptr;
  args.y = quantize ? row : internal::RowAt(y, to);
  context.kernels->rms_norm[internal::Slot(KernelDType(y))](args, context.stream);
  if (quantize) internal::QuantizeRows(context, row, y.cols, y, to, to + 1);
}

}  // namespace

void RmsNorm(const OpContext& context, const ConstMatrix& x, const float* weight, float eps,
             const Matrix& y) {
  CheckNorm(context, x, weight, y);
  AS_CHECK(x.rows == y.rows) << "rms_norm: x has " << x.rows << " rows, y has " << y.rows;
  const kernels::RmsNormArgs args = NormArgs(x, weight, eps, y);
  const auto kernel = context.kernels->rms_norm[internal::Slot(KernelDType(y))];
  context.pool->ParallelFor(x.rows, internal::RowGrain(x.cols),
                            [&](int64_t begin, int64_t end, int thread_id) {
                              if (y.dtype != DType::kInt8) {
                                kernels::RmsNormArgs part = args;
                                part.x = static_cast<const float*>(internal::RowAt(x, begin));
                                part.y = internal::RowAt(y, begin);
                                part.rows = end - begin;
                                return kernel(part, context.stream);
                              }
                              for (int64_t i = begin; i < end; ++i) {
                                NormRow(context, x, i, args, y, i, thread_id);
                              }
                            });
}

void RmsNormGather(const OpContext& context, const ConstMatrix& x, const int64_t* row_ids,
                   const float* weight, float eps, const Matrix& y) {
  CheckNorm(context, x, weight, y);
  for (int64_t i = 0; i < y.rows; ++i) {
    AS_CHECK(row_ids[i] >= 0 && row_ids[i] < x.rows)
        << "rms_norm: row " << row_ids[i] << " wanted; x has " << x.rows << " rows";
  }
  const kernels::RmsNormArgs args = NormArgs(x, weight, eps, y);
  context.pool->ParallelFor(y.rows, internal::RowGrain(x.cols),
                            [&](int64_t begin, int64_t end, int thread_id) {
                              for (int64_t i = begin; i < end; ++i) {
                                NormRow(context, x, row_ids[i], args, y, i, thread_id);
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
