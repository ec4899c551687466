// How products are cut between threads. Private to ops/cpu.
#pragma once

#include <span>

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
// still has local_rows of them (KernelTable).
struct LinearSplit {
  int64_t row_parts = 1;
  int64_t panel_parts = 1;
};
LinearSplit SplitLinear(int64_t rows, int64_t panels, int64_t num_threads, int64_t local_rows);

// The arguments for these rows and panels of x * w^T; only the result's address is missing.
kernels::GemmArgs GemmArgsOf(const kernels::KernelTable& kernels, const ConstMatrix& x,
                             const LinearWeight& w, Range rows, Range panels,
                             std::span<const kernels::LowRank> low_rank);

}  // namespace allspark::cpu
