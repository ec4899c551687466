// How products are cut between threads. Private to ops/cpu.
#pragma once

#include <algorithm>
#include <span>

#include "base/int_math.h"
#include "kernels/kernel_table.h"
#include "ops/linear.h"

namespace allspark::cpu {

// Multiply-adds below which one thread is faster than a parallel region.
inline constexpr int64_t kSerialLinearWork = 1 << 16;
// Items per thread: enough that others can take items from a late thread, few enough that an item
// still has contiguous panels.
inline constexpr int64_t kLinearItemsPerThread = 8;

struct Range {
  int64_t begin;
  int64_t end;
};

// How the work of one Linear is cut: row_parts x panel_parts rectangles, one per thread. Between
// panels of output columns; between rows too if that balances the threads better, or if every part
// still has local_rows of them (KernelTable). Few rows may be cut between strips of a panel, too.
struct LinearSplit {
  int64_t row_parts = 1;
  int64_t panel_parts = 1;
  int64_t strips = 1;  // per panel
};
LinearSplit SplitLinear(int64_t rows, int64_t panels, int64_t num_threads, int64_t local_rows,
                        bool may_strip = false);

// Whether a product may be cut into strips.
inline bool MayStrip(int64_t rows, std::span<const kernels::LowRank> low_rank) {
  return rows <= kernels::kMostStripRows && low_rank.empty();
}
// The strips into which each of `panels` panels is cut, so that threads have equal parts: 1 or all.
int64_t StripsFor(int64_t panels, int64_t num_threads);

// The columns [begin, begin + columns) of each of these panels.
struct Strip {
  Range panels;
  int64_t begin = 0;
  int64_t columns = kernels::kPanelColumns;
};

// Calls run(strip) for a range of the strips of a weight [n, k]: whole panels at once, and the
// strips of one panel. Those beyond n are left out.
template <class Run>
void ForEachStrip(Range strips, int64_t strips_per_panel, int64_t n, const Run& run) {
  const int64_t width = kernels::kPanelColumns / strips_per_panel;
  const int64_t end = std::min(strips.end, CeilDiv(n, width));
  for (int64_t at = strips.begin; at < end;) {
    const int64_t panel = at / strips_per_panel, first = at % strips_per_panel;
    const int64_t whole = first == 0 ? (end - at) / strips_per_panel : 0;
    if (whole > 0) {
      run(Strip{{panel, panel + whole}});
      at += whole * strips_per_panel;
    } else {
      const int64_t count = std::min(strips_per_panel - first, end - at);
      run(Strip{{panel, panel + 1}, first * width, count * width});
      at += count;
    }
  }
}

// The arguments for these rows and columns of x * w^T; only the result's address is missing.
kernels::GemmArgs GemmArgsOf(const kernels::KernelTable& kernels, const ConstMatrix& x,
                             const LinearWeight& w, Range rows, const Strip& strip,
                             std::span<const kernels::LowRank> low_rank);

}  // namespace allspark::cpu
