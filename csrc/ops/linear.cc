#include "ops/linear.h"

#include "base/int_math.h"
#include "ops/gated_act.h"
#include "ops/linear_args.h"
#include "ops/op_check.h"
#include "ops/quantize.h"

namespace allspark {
namespace internal {

void CheckLinear(const OpContext& context, const ConstMatrix& x, const LinearWeight& w) {
  CheckMatrix("linear", "x", x);
  AS_CHECK(w.data != nullptr && w.n > 0 && w.k > 0)
      << "linear: the weight is [" << w.n << ", " << w.k << "], data " << w.data;
  AS_CHECK(x.cols == w.k) << "linear: x has " << x.cols << " columns; the weight reads " << w.k;
  if (w.activation.dtype != DType::kUndefined) {
    CheckDType("linear", "x", x.dtype, w.activation.dtype);
    AS_CHECK(x.scale_group == w.activation.scale_group)
        << "linear: x has a scale for every " << x.scale_group
        << " columns; the weight reads one for " << w.activation.scale_group;
  }
  const int64_t group = PackedPerLane(w.dtype);
  AS_CHECK(group > 0 && w.k % group == 0)
      << "linear: k is " << w.k << "; " << DTypeName(w.dtype) << " weights are packed by " << group;
  if (IsQuantized(w.dtype)) CheckScales("linear", w.scales, w.dtype, w.k);
  AS_CHECK(x.dtype != DType::kInt8 || (x.row_scale != nullptr && x.row_sums != nullptr))
      << "linear: x is int8 without scales";
  CheckScaleGroup("linear", x.scale_group, x.cols);
  AS_CHECK(context.kernels->gemm[Slot(w.dtype)][Slot(x.dtype)] != nullptr)
      << "linear: kernel table '" << context.kernels->name << "' has no gemm for "
      << DTypeName(w.dtype) << " weights and " << DTypeName(x.dtype) << " activations";
}

void CountLinear(const LinearWeight& w, int64_t rows, OpTimer& timer) {
  if (!timer.is_on()) return;
  const int64_t elements = w.n * w.k;
  const int64_t high = w.scales.high == nullptr ? 0 : elements / 4;
  timer.Count(elements * 4 / PackedPerLane(w.dtype) + high, 2 * rows * elements);
}

void CheckLinearResult(const ConstMatrix& x, const Matrix& y, int64_t cols) {
  CheckMatrix("linear", "y", y);
  AS_CHECK(y.cols == cols) << "linear: y has " << y.cols << " columns; the weight makes " << cols;
  AS_CHECK(x.rows == y.rows) << "linear: x has " << x.rows << " rows, y has " << y.rows;
}

void CheckLowRank(const LinearWeight& w, std::span<const kernels::LowRank> low_rank) {
  const int64_t panels = CeilDiv(w.n, kernels::kPanelColumns);
  for (const kernels::LowRank& low : low_rank) {
    AS_CHECK(low.panel_begin >= 0 && low.panel_end <= panels)
        << "linear: an adapter of panels [" << low.panel_begin << ", " << low.panel_end << ") of "
        << panels;
  }
}

kernels::GemmArgs GemmArgsOf(const ConstMatrix& x, const LinearWeight& w, Range rows, Range panels,
                             std::span<const kernels::LowRank> low_rank) {
  kernels::GemmArgs args{};
  args.a = RowAt(x, rows.begin);
  args.lda = x.ld;
  args.w = w.data;
  args.bias = w.bias;
  args.m = rows.end - rows.begin;
  args.n = w.n;
  args.k = w.k;
  args.panel_begin = panels.begin;
  args.panel_end = panels.end;
  args.scales = w.scales;
  args.low_rank = low_rank.data();
  args.num_low_rank = static_cast<int64_t>(low_rank.size());
  args.first_row = rows.begin;
  if (x.dtype == DType::kInt8) {
    args.a_scale = x.row_scale + rows.begin * x.num_scales();
    args.a_scale_group = x.scale_group;
    args.a_sums = x.row_sums + rows.begin * kernels::RowSums(x.cols);
  }
  return args;
}

}  // namespace internal

namespace {

// Row parts are multiples of this many rows, so that register tiles stay full.
constexpr int64_t kRowGranule = 32;
// From this many rows per part on, cutting rows is better than cutting panels: a thread then finds
// the rows that it computed itself in its own cache. The weights are read once more, but arrive in
// time.
constexpr int64_t kLocalRows = 128;
using internal::Range;

// Part number `part` of [0, count) cut into `parts` parts of whole granules.
Range PartOf(int64_t count, int64_t granule, int64_t part, int64_t parts) {
  const int64_t granules = CeilDiv(count, granule);
  return {std::min(count, granules * part / parts * granule),
          std::min(count, granules * (part + 1) / parts * granule)};
}

// Cuts x * w^T, over the first `panels` panels of the weight, into parts and calls run(args, row)
// for each on the pool. `args` lacks only the result's address; `row` is the part's first row.
template <class Run>
void ForEachPart(const OpContext& context, const ConstMatrix& x, const LinearWeight& w,
                 int64_t panels, std::span<const kernels::LowRank> low_rank, const Run& run) {
  const bool serial = x.rows * w.n <= internal::kSerialLinearWork / w.k;
  const LinearSplit split =
      serial ? LinearSplit{} : SplitLinear(x.rows, panels, context.pool->num_threads());
  const int64_t items =
      serial ? 1 : std::min(internal::kLinearItemsPerThread, CeilDiv(panels, split.panel_parts));
  context.pool->ParallelForItems(
      split.row_parts * split.panel_parts * items, [&](int64_t item, int) {
        const int64_t part = item / items;
        const Range rows = PartOf(x.rows, split.row_parts == 1 ? 1 : kRowGranule,
                                  part / split.panel_parts, split.row_parts);
        const Range item_panels = PartOf(panels, 1, part % split.panel_parts * items + item % items,
                                         split.panel_parts * items);
        if (rows.begin == rows.end || item_panels.begin == item_panels.end) return;
        kernels::GemmArgs args = internal::GemmArgsOf(x, w, rows, item_panels, low_rank);
        run(args, rows.begin);
      });
}

// LinearGated, or LinearActivated where !gated.
void RunActivated(const OpContext& context, const ConstMatrix& x, const LinearWeight& w,
                  kernels::Activation activation, bool gated, const Matrix& scratch,
                  const Matrix& y, std::span<const kernels::LowRank> low_rank) {
  internal::CheckLinear(context, x, w);
  internal::CheckLinearResult(x, y, gated ? w.n / 2 : w.n);
  internal::CheckLinearResult(x, scratch, w.n);
  internal::CheckLowRank(w, low_rank);
  internal::CheckDType("linear", "scratch", scratch.dtype, DType::kFloat32);
  const auto kernel = context.kernels->gemm_gated[internal::Slot(w.dtype)][internal::Slot(x.dtype)];
  if (kernel == nullptr || (gated && w.n % (2 * kernels::kPanelColumns) != 0)) {
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
  ForEachPart(context, x, w, CeilDiv(y.cols, kernels::kPanelColumns), low_rank,
              [&](const kernels::GemmArgs& args, int64_t row) {
                kernel({args, internal::RowAt(out, row), out.ld, out.dtype, activation, gated},
                       context.stream);
              });
  if (quantize) Quantize(context, out, y);
}

}  // namespace

LinearSplit SplitLinear(int64_t rows, int64_t panels, int64_t num_threads) {
  const int64_t row_granules = CeilDiv(rows, kRowGranule);
  LinearSplit best;
  int64_t best_cost = 0;
  for (int64_t row_parts = 1; row_parts <= std::min(num_threads, row_granules); ++row_parts) {
    const int64_t panel_parts = std::min(panels, num_threads / row_parts);
    // The work of the slowest part. Every row part reads the whole weight again; so with few rows,
    // more row parts must save a twentieth of the cost.
    const int64_t cost = CeilDiv(row_granules, row_parts) * CeilDiv(panels, panel_parts);
    const bool local = rows >= row_parts * kLocalRows;
    if (row_parts == 1 || cost * 20 < best_cost * 19 || (local && cost <= best_cost)) {
      best = {row_parts, panel_parts};
      best_cost = cost;
    }
  }
  return best;
}

void Linear(const OpContext& context, const ConstMatrix& x, const LinearWeight& w, bool accumulate,
            const Matrix& y, std::span<const kernels::LowRank> low_rank) {
  internal::CheckLinear(context, x, w);
  internal::CheckLinearResult(x, y, w.n);
  internal::CheckLowRank(w, low_rank);
  internal::CheckDType("linear", "y", y.dtype, DType::kFloat32);
  if (x.rows == 0) return;
  internal::Observe(context, w, x);
  OpTimer timer(context.profile, w.op);
  internal::CountLinear(w, x.rows, timer);
  const auto gemm = context.kernels->gemm[internal::Slot(w.dtype)][internal::Slot(x.dtype)];
  ForEachPart(context, x, w, CeilDiv(w.n, kernels::kPanelColumns), low_rank,
              [&](kernels::GemmArgs& args, int64_t row) {
                args.c = static_cast<float*>(internal::RowAt(y, row));
                args.ldc = y.ld;
                args.accumulate = accumulate;
                gemm(args, context.stream);
              });
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
