#include "ops/norm.h"

#include "ops/op_check.h"

namespace allspark {
namespace {

// The kernel's result dtype: an int8 result is quantised from float32.
DType KernelDType(const Matrix& y) { return y.dtype == DType::kInt8 ? DType::kFloat32 : y.dtype; }

const char* NameOf(const NormWeight& norm) { return norm.centered ? "layer_norm" : "rms_norm"; }

auto KernelFor(const OpContext& context, const NormWeight& norm, const Matrix& y) {
  const kernels::KernelTable& table = *context.kernels;
  const int slot = internal::Slot(KernelDType(y));
  return norm.centered ? table.layer_norm[slot] : table.rms_norm[slot];
}

void CheckNorm(const OpContext& context, const ConstMatrix& x, const NormWeight& norm,
               const Matrix& y) {
  const char* op = NameOf(norm);
  internal::CheckMatrix(op, "x", x);
  internal::CheckMatrix(op, "y", y);
  internal::CheckDType(op, "x", x.dtype, DType::kFloat32);
  AS_CHECK(norm.weight != nullptr) << op << ": no weight";
  AS_CHECK(norm.centered || norm.bias == nullptr) << op << ": it has no bias";
  AS_CHECK(x.cols == y.cols) << op << ": x has " << x.cols << " columns, y has " << y.cols;
  internal::CheckKernel(op, KernelDType(y), KernelFor(context, norm, y) != nullptr, context);
  if (y.dtype == DType::kInt8) internal::CheckQuantized(op, context, y);
}

kernels::NormArgs ArgsFor(const ConstMatrix& x, const NormWeight& norm, const Matrix& y) {
  kernels::NormArgs args{};
  args.x = static_cast<const float*>(x.data);
  args.ldx = x.ld;
  args.weight = norm.weight;
  args.y = y.data;
  args.ldy = y.ld;
  args.rows = x.rows;
  args.cols = x.cols;
  args.eps = norm.eps;
  args.bias = norm.bias;
  return args;
}

// Writes the norm of row `from` of x to row `to` of y.
void NormRow(const OpContext& context, const ConstMatrix& x, int64_t from, const NormWeight& norm,
             const Matrix& y, int64_t to, int thread_id) {
  kernels::NormArgs args = ArgsFor(x, norm, y);
  args.x = static_cast<const float*>(internal::RowAt(x, from));
  args.rows = 1;
  const bool quantize = y.dtype == DType::kInt8;
  float* row = quantize ? internal::ScratchRow(NameOf(norm), context, y.cols, thread_id) : nullptr;
  args.y = quantize ? row : internal::RowAt(y, to);
  KernelFor(context, norm, y)(args, context.stream);
  if (quantize) internal::QuantizeRows(context, row, y.cols, y, to, to + 1);
}

}  // namespace

void Norm(const OpContext& context, const ConstMatrix& x, const NormWeight& norm, const Matrix& y) {
  const OpTimer timer(context.profile, Op::kNorm);
  CheckNorm(context, x, norm, y);
  AS_CHECK(x.rows == y.rows) << NameOf(norm) << ": x has " << x.rows << " rows, y has " << y.rows;
  context.pool->ParallelFor(x.rows, internal::RowGrain(x.cols),
                            [&](int64_t begin, int64_t end, int thread_id) {
                              if (y.dtype != DType::kInt8) {
                                kernels::NormArgs part = ArgsFor(x, norm, y);
                                part.x = static_cast<const float*>(internal::RowAt(x, begin));
                                part.y = internal::RowAt(y, begin);
                                part.rows = end - begin;
                                return KernelFor(context, norm, y)(part, context.stream);
                              }
                              for (int64_t i = begin; i < end; ++i) {
                                NormRow(context, x, i, norm, y, i, thread_id);
                              }
                            });
}

void NormGather(const OpContext& context, const ConstMatrix& x, const int64_t* row_ids,
                const NormWeight& norm, const Matrix& y) {
  const OpTimer timer(context.profile, Op::kNorm);
  CheckNorm(context, x, norm, y);
  for (int64_t i = 0; i < y.rows; ++i) {
    AS_CHECK(row_ids[i] >= 0 && row_ids[i] < x.rows)
        << NameOf(norm) << ": row " << row_ids[i] << " wanted; x has " << x.rows << " rows";
  }
  context.pool->ParallelFor(y.rows, internal::RowGrain(x.cols),
                            [&](int64_t begin, int64_t end, int thread_id) {
                              for (int64_t i = begin; i < end; ++i) {
                                NormRow(context, x, row_ids[i], norm, y, i, thread_id);
                              }
                            });
}

void NormHeads(const OpContext& context, const Matrix& x, int64_t head_begin, int64_t num_heads,
               int64_t head_dim, const NormWeight& norm) {
  const OpTimer timer(context.profile, Op::kNorm);
  CheckNorm(context, x, norm, x);
  AS_CHECK(head_dim > 0 && head_begin >= 0 && num_heads > 0 &&
           (head_begin + num_heads) * head_dim <= x.cols)
      << NameOf(norm) << ": heads [" << head_begin << ", " << head_begin + num_heads << ") of "
      << head_dim << " elements do not lie in " << x.cols << " columns";
  const auto kernel = KernelFor(context, norm, x);
  context.pool->ParallelFor(
      x.rows, internal::RowGrain(num_heads * head_dim), [&](int64_t begin, int64_t end, int) {
        kernels::NormArgs args = ArgsFor(x, norm, x);
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
