// How the reference kernels read and write elements: in double, rounded once at the end.
#pragma once

#include "kernels/args.h"

namespace allspark::kernels {

static AS_ALWAYS_INLINE double Load(const float* p) { return static_cast<double>(*p); }
static AS_ALWAYS_INLINE double Load(const BFloat16* p) { return static_cast<double>(ToFloat(*p)); }
static AS_ALWAYS_INLINE double Load(const Float16* p) { return static_cast<double>(ToFloat(*p)); }
static AS_ALWAYS_INLINE double Load(const int8_t* p) { return *p; }

// Through float32, as every kernel does: a double is first rounded to float, then to the stored
// type.
static AS_ALWAYS_INLINE void Store(float* p, double x) { *p = static_cast<float>(x); }
static AS_ALWAYS_INLINE void Store(BFloat16* p, double x) {
  *p = ToBFloat16(static_cast<float>(x));
}

// The sums of a row of int8 activations, as args.h lays them out.
inline void SumBlocks(const int8_t* q, int64_t cols, int32_t* sums) {
  int32_t sum = 0;
  for (int64_t i = 0; i < cols; ++i) {
    if (i % kSumBlock == 0) *sums++ = sum;
    sum += q[i];
  }
  *sums = sum;
}

// Whether a GEMM's call computes column n.
inline bool InStrip(const GemmArgs& args, int64_t n) {
  const int64_t column = n % args.panel_columns - args.strip_begin;
  return column >= 0 && column < args.strip_columns;
}

// The sum that adapters add to element (row, n) of a GEMM's result.
inline double LowRankSum(const GemmArgs& args, int64_t row, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < args.num_low_rank; ++i) {
    const LowRank& low = args.low_rank[i];
    const int64_t at = args.first_row + row, panel = n / kPanelColumns;
    if (at < low.row_begin || at >= low.row_end) continue;
    if (panel < low.panel_begin || panel >= low.panel_end) continue;
    float sums[kPanelColumns] = {};
    args.add_low_rank(low, at, 1, panel, sums);
    sum += Load(sums + n % kPanelColumns);
  }
  return sum;
}

}  // namespace allspark::kernels
