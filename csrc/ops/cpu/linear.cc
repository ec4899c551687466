#include <algorithm>

#include "base/int_math.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/linear_split.h"
#include "ops/cpu/rows.h"

namespace allspark {
namespace cpu {
namespace {

// Row parts are multiples of this many rows, so that register tiles stay full.
constexpr int64_t kRowGranule = 32;

// Part number `part` of [0, count) cut into `parts` parts of whole granules.
Range PartOf(int64_t count, int64_t granule, int64_t part, int64_t parts) {
  const int64_t granules = CeilDiv(count, granule);
  return {std::min(count, granules * part / parts * granule),
          std::min(count, granules * (part + 1) / parts * granule)};
}

// Cuts x * w^T, over the first `panels` panels of the weight, into parts and calls run(args, row)
// on the pool, once or more for each. `args` lacks only the result's address; `row` is the part's
// first row.
template <class Run>
void ForEachPiece(const kernels::KernelTable& kernels, ThreadPool& pool, const ConstMatrix& x,
                  const LinearWeight& w, int64_t panels, std::span<const kernels::LowRank> low_rank,
                  const Run& run) {
  const bool serial = x.rows * w.n <= kSerialLinearWork / w.k;
  const LinearSplit split = serial ? LinearSplit{}
                                   : SplitLinear(x.rows, panels, pool.num_threads(),
                                                 kernels.local_rows, MayStrip(x.rows, low_rank));
  const int64_t strips = panels * split.strips;
  const int64_t items =
      serial ? 1 : std::min(kLinearItemsPerThread, CeilDiv(strips, split.panel_parts));
  pool.ParallelForItems(split.row_parts * split.panel_parts * items, [&](int64_t item, int) {
    const int64_t part = item / items;
    const Range rows = PartOf(x.rows, split.row_parts == 1 ? 1 : kRowGranule,
                              part / split.panel_parts, split.row_parts);
    const Range item_strips = PartOf(strips, 1, part % split.panel_parts * items + item % items,
                                     split.panel_parts * items);
    if (rows.begin == rows.end) return;
    ForEachStrip(item_strips, split.strips, w.n, [&](const Strip& strip) {
      kernels::GemmArgs args = GemmArgsOf(kernels, x, w, rows, strip, low_rank);
      run(args, rows.begin);
    });
  });
}

}  // namespace

kernels::GemmArgs GemmArgsOf(const kernels::KernelTable& kernels, const ConstMatrix& x,
                             const LinearWeight& w, Range rows, const Strip& strip,
                             std::span<const kernels::LowRank> low_rank) {
  kernels::GemmArgs args{};
  args.a = RowAt(x, rows.begin);
  args.lda = x.ld;
  args.w = w.data;
  args.bias = w.bias;
  args.m = rows.end - rows.begin;
  args.n = w.n;
  args.k = w.k;
  args.panel_begin = strip.panels.begin;
  args.panel_end = strip.panels.end;
  args.strip_begin = strip.begin;
  args.strip_columns = strip.columns;
  args.scales = w.scales;
  args.low_rank = low_rank.data();
  args.num_low_rank = static_cast<int64_t>(low_rank.size());
  // All of a step have one dtype.
  if (!low_rank.empty()) args.add_low_rank = kernels.low_rank[Slot(low_rank.front().dtype)];
  args.first_row = rows.begin;
  if (x.dtype == DType::kInt8) {
    args.a_scale = x.row_scale + rows.begin * x.num_scales();
    args.a_scale_group = x.scale_group;
    args.a_sums = x.row_sums + rows.begin * kernels::RowSums(x.cols);
  }
  return args;
}

int64_t StripsFor(int64_t panels, int64_t num_threads) {
  constexpr int64_t kStrips = kernels::kPanelColumns / kernels::kStripColumns;
  // A thread reads strips more slowly than whole panels, at 13 GB/s or more on a Zen 4. So many
  // threads are still limited by memory alone; fewer would lose more than they gain.
  constexpr int64_t kFewestThreads = 16;
  if (num_threads < kFewestThreads) return 1;
  const int64_t whole = CeilDiv(panels, num_threads) * kStrips;
  const int64_t cut = CeilDiv(panels * kStrips, num_threads);
  return cut * 20 < whole * 17 ? kStrips : 1;
}

LinearSplit SplitLinear(int64_t rows, int64_t panels, int64_t num_threads, int64_t local_rows,
                        bool may_strip) {
  if (const int64_t strips = may_strip ? StripsFor(panels, num_threads) : 1; strips > 1) {
    return {
        .row_parts = 1, .panel_parts = std::min(panels * strips, num_threads), .strips = strips};
  }
  const int64_t row_granules = CeilDiv(rows, kRowGranule);
  LinearSplit best;
  int64_t best_cost = 0;
  for (int64_t row_parts = 1; row_parts <= std::min(num_threads, row_granules); ++row_parts) {
    const int64_t panel_parts = std::min(panels, num_threads / row_parts);
    // The work of the slowest part. Every row part reads the whole weight again; so with few rows,
    // more row parts must save a twentieth of the cost.
    const int64_t cost = CeilDiv(row_granules, row_parts) * CeilDiv(panels, panel_parts);
    const bool local = rows >= row_parts * local_rows;
    if (row_parts == 1 || cost * 20 < best_cost * 19 || (local && cost <= best_cost)) {
      best = {row_parts, panel_parts};
      best_cost = cost;
    }
  }
  return best;
}

}  // namespace cpu

void CpuOps::Linear(const ConstMatrix& x, const LinearWeight& w, bool accumulate, const Matrix& y,
                    std::span<const kernels::LowRank> low_rank) {
  const auto gemm = kernels_.gemm[cpu::Slot(w.dtype)][cpu::Slot(x.dtype)];
  cpu::ForEachPiece(kernels_, pool_, x, w, CeilDiv(w.n, kernels::kPanelColumns), low_rank,
                    [&](kernels::GemmArgs& args, int64_t row) {
                      args.c = static_cast<float*>(cpu::RowAt(y, row));
                      args.ldc = y.ld;
                      args.accumulate = accumulate;
                      gemm(args);
                    });
}

void CpuOps::FusedLinear(const ConstMatrix& x, const LinearWeight& w,
                         kernels::Activation activation, bool gated, const Matrix& y,
                         std::span<const kernels::LowRank> low_rank) {
  const auto kernel = kernels_.gemm_gated[cpu::Slot(w.dtype)][cpu::Slot(x.dtype)];
  cpu::ForEachPiece(kernels_, pool_, x, w, CeilDiv(y.cols, kernels::kPanelColumns), low_rank,
                    [&](const kernels::GemmArgs& args, int64_t row) {
                      kernel({args, cpu::RowAt(y, row), y.ld, y.dtype, activation, gated});
                    });
}

}  // namespace allspark
