#include "ops/norm.h"

#include "ops/op_check.h"

namespace allspark {
namespace {

const char* NameOf(const NormWeight& norm) { return norm.centered ? "layer_norm" : "rms_norm"; }

void CheckNorm(const OpContext& context, const ConstMatrix& x, const NormWeight& norm,
               const Matrix& y) {
  const char* op = NameOf(norm);
  internal::CheckFloats(op, "x", x);
  internal::CheckMatrix(op, "y", y);
  AS_CHECK(norm.weight != nullptr) << op << ": no weight";
  AS_CHECK(norm.centered || norm.bias == nullptr) << op << ": it has no bias";
  AS_CHECK(x.cols == y.cols) << op << ": x has " << x.cols << " columns, y has " << y.cols;
  // An int8 result is quantised from float32.
  const bool quantize = y.dtype == DType::kInt8;
  const DType dtype = quantize ? DType::kFloat32 : y.dtype;
  internal::CheckHas(op, context, dtype, norm.centered ? OpKind::kLayerNorm : OpKind::kRmsNorm,
                     dtype);
  if (!quantize) return;
  internal::CheckQuantized(op, context, y);
  internal::CheckRowScratch(op, context, y.cols);
}

}  // namespace

void Norm(const OpContext& context, const ConstMatrix& x, const NormWeight& norm, const Matrix& y) {
  const OpTimer timer(context.profile, Op::kNorm);
  CheckNorm(context, x, norm, y);
  AS_CHECK(x.rows == y.rows) << NameOf(norm) << ": x has " << x.rows << " rows, y has " << y.rows;
  context.ops->Norm(x, /*row_ids=*/nullptr, norm, context.row_scratch, y);
}

void NormGather(const OpContext& context, const ConstMatrix& x, const int64_t* row_ids,
                const NormWeight& norm, const Matrix& y) {
  const OpTimer timer(context.profile, Op::kNorm);
  CheckNorm(context, x, norm, y);
  AS_CHECK(row_ids != nullptr || y.rows == 0) << NameOf(norm) << ": no rows are named";
  context.ops->Norm(x, row_ids, norm, context.row_scratch, y);
}

void NormHeads(const OpContext& context, const Matrix& x, int64_t head_begin, int64_t num_heads,
               int64_t head_dim, const NormWeight& norm) {
  const OpTimer timer(context.profile, Op::kNorm);
  CheckNorm(context, x, norm, x);
  AS_CHECK(head_dim > 0 && head_begin >= 0 && num_heads > 0 &&
           (head_begin + num_heads) * head_dim <= x.cols)
      << NameOf(norm) << ": heads [" << head_begin << ", " << head_begin + num_heads << ") of "
      << head_dim << " elements do not lie in " << x.cols << " columns";
  context.ops->NormHeads(x, head_begin, num_heads, head_dim, norm);
}

}  // namespace allspark
