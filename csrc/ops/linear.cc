#include "ops/linear.h"

#include "base/int_math.h"
#include "ops/gated_act.h"
#include "ops/linear_check.h"
#include "ops/op_check.h"
#include "ops/quantize.h"

namespace allspark {
namespace internal {
namespace {

void CheckLowRank(const LinearWeight& w, std::span<const kernels::LowRank> low_rank) {
  const int64_t panels = CeilDiv(w.n, kernels::kPanelColumns);
  for (const kernels::LowRank& low : low_rank) {
    AS_CHECK(low.panel_begin >= 0 && low.panel_end <= panels)
        << "linear: an adapter of panels [" << low.panel_begin << ", " << low.panel_end << ") of "
        << panels;
  }
}

}  // namespace

void CheckLinear(const OpContext& context, const ConstMatrix& x, const LinearWeight& w) {
  CheckMatrix("linear", "x", x);
  AS_CHECK(w.data != nullptr && w.n > 0 && w.k > 0)
      << "linear: the weight is [" << w.n << ", " << w.k << "], data " << w.data;
  AS_CHECK(x.cols == w.k) << "linear: x has " << x.cols << " columns; the weight reads " << w.k;
  if (w.input.dtype != DType::kUndefined) {
    CheckDType("linear", "x", x.dtype, w.input.dtype);
    AS_CHECK(x.scale_group == w.input.scale_group)
        << "linear: x has a scale for every " << x.scale_group
        << " columns; the weight reads one for " << w.input.scale_group;
  }
  const int64_t bits = ElementBits(w.dtype);
  const int64_t group = bits > 0 && bits <= 32 ? 32 / bits : 0;  // in one 32-bit lane
  AS_CHECK(group > 0 && w.k % group == 0)
      << "linear: k is " << w.k << "; " << DTypeName(w.dtype) << " weights are packed by " << group;
  if (IsQuantized(w.dtype)) CheckScales("linear", w.scales, w.dtype, w.k);
  CheckInt8Scales("linear", "x", x);
  CheckScaleGroup("linear", x.scale_group, x.cols);
  AS_CHECK(context.ops->Has(OpKind::kLinear, w.dtype, x.dtype))
      << "linear: kernel table '" << context.ops->name() << "' has no gemm for "
      << DTypeName(w.dtype) << " weights and " << DTypeName(x.dtype) << " activations";
}

void CountLinear(const LinearWeight& w, int64_t rows, OpTimer& timer) {
  if (!timer.is_on()) return;
  const int64_t elements = w.n * w.k;
  const int64_t high = w.scales.high == nullptr ? 0 : PackedBytes(DType::kUInt2, elements);
  timer.Count(PackedBytes(w.dtype, elements) + high, 2 * rows * elements);
}

void CheckLinearResult(const ConstMatrix& x, const Matrix& y, int64_t cols) {
  CheckMatrix("linear", "y", y);
  AS_CHECK(y.cols == cols) << "linear: y has " << y.cols << " columns; the weight makes " << cols;
  AS_CHECK(x.rows == y.rows) << "linear: x has " << x.rows << " rows, y has " << y.rows;
}

void CheckProduct(const OpContext& context, const ConstMatrix& x, const LinearWeight& w,
                  const Matrix& y, int64_t cols, std::span<const kernels::LowRank> low_rank) {
  CheckLinear(context, x, w);
  CheckLinearResult(x, y, cols);
  CheckLowRank(w, low_rank);
}

bool IsFused(const OpContext& context, const ConstMatrix& x, const LinearWeight& w, bool gated) {
  return (!gated || w.n % (2 * kernels::kPanelColumns) == 0) &&
         context.ops->Has(OpKind::kFusedLinear, w.dtype, x.dtype);
}

}  // namespace internal

namespace {

// LinearGated, or LinearActivated where !gated.
void RunActivated(const OpContext& context, const ConstMatrix& x, const LinearWeight& w,
                  kernels::Activation activation, bool gated, const Matrix& scratch,
                  const Matrix& y, std::span<const kernels::LowRank> low_rank) {
  internal::CheckProduct(context, x, w, y, gated ? w.n / 2 : w.n, low_rank);
  internal::CheckLinearResult(x, scratch, w.n);
  internal::CheckDType("linear", "scratch", scratch.dtype, DType::kFloat32);
  if (!internal::IsFused(context, x, w, gated)) {
    Linear(context, x, w, /*accumulate=*/false, scratch, low_rank);
    return gated ? GatedAct(context, activation, scratch, y)
                 : Activate(context, activation, scratch, y);
  }
  if (x.rows == 0) return;
  internal::Observe(context, w, x);
  OpTimer timer(context.profile, w.op);
  internal::CountLinear(w, x.rows, timer);
  // An int8 row is quantised only after all its columns are computed.
  const bool quantize = y.dtype == DType::kInt8;
  const Matrix out =
      quantize ? Matrix{scratch.data, DType::kFloat32, y.rows, y.cols, /*ld=*/y.cols} : y;
  context.ops->FusedLinear(x, w, activation, gated, out, low_rank);
  if (quantize) Quantize(context, out, y);
}

}  // namespace

LinearWeight WeightOf(const LinearWeight& all, int64_t count, int64_t i) {
  LinearWeight one = all;
  one.n = all.n / count;
  const int64_t elements = i * one.n * one.k;
  one.data = static_cast<const unsigned char*>(all.data) + PackedBytes(all.dtype, elements);
  if (!IsQuantized(all.dtype)) return one;
  const int64_t groups = i * one.n * (one.k / all.scales.group_size);
  const int64_t blocks = i * one.n * (one.k / kernels::kScaleBlock);
  const auto passed = [&](const void* stored) -> const void* {
    if (stored == nullptr) return nullptr;
    return static_cast<const unsigned char*>(stored) + groups * ScaleBytes(all.scales.type);
  };
  one.scales.scale = passed(all.scales.scale);
  one.scales.offset = passed(all.scales.offset);
  if (one.scales.zero != nullptr) one.scales.zero += groups;
  if (one.scales.block_scale != nullptr) one.scales.block_scale += blocks;
  if (one.scales.block_offset != nullptr) one.scales.block_offset += blocks;
  if (one.scales.high != nullptr) one.scales.high += PackedBytes(DType::kUInt2, elements);
  return one;
}

void Linear(const OpContext& context, const ConstMatrix& x, const LinearWeight& w, bool accumulate,
            const Matrix& y, std::span<const kernels::LowRank> low_rank) {
  internal::CheckProduct(context, x, w, y, w.n, low_rank);
  internal::CheckDType("linear", "y", y.dtype, DType::kFloat32);
  if (x.rows == 0) return;
  internal::Observe(context, w, x);
  OpTimer timer(context.profile, w.op);
  internal::CountLinear(w, x.rows, timer);
  context.ops->Linear(x, w, accumulate, y, low_rank);
}

void LinearGated(const OpContext& context, const ConstMatrix& x, const LinearWeight& w,
                 kernels::Activation activation, const Matrix& scratch, const Matrix& y,
                 std::span<const kernels::LowRank> low_rank) {
  AS_CHECK(w.n % 2 == 0) << "linear: the weight makes " << w.n << " columns of gate and up";
  RunActivated(context, x, w, activation, /*gated=*/true, scratch, y, low_rank);
}

void LinearActivated(const OpContext& context, const ConstMatrix& x, const LinearWeight& w,
                     kernels::Activation activation, const Matrix& scratch, const Matrix& y,
                     std::span<const kernels::LowRank> low_rank) {
  RunActivated(context, x, w, activation, /*gated=*/false, scratch, y, low_rank);
}

}  // namespace allspark
