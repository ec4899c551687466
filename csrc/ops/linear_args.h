// Shared by Linear and LinearEach. Private to ops/.
#pragma once

#include <span>

#include "ops/linear.h"

namespace allspark::internal {

// Multiply-adds below which one thread is faster than a parallel region.
inline constexpr int64_t kSerialLinearWork = 1 << 16;
// Items per thread: enough that others can take items from a late thread, few enough that an item
// still has contiguous panels.
inline constexpr int64_t kLinearItemsPerThread = 8;

struct Range {
  int64_t begin;
  int64_t end;
};

// Shows the input of a product that has rows to the context's observer.
inline void Observe(const OpContext& context, const LinearWeight& w, const ConstMatrix& x) {
  if (context.observer != nullptr) context.observer->See(context, w, x);
}

// Counts one product with `rows` rows.
void CountLinear(const LinearWeight& w, int64_t rows, OpTimer& timer);
void CheckLinear(const OpContext& context, const ConstMatrix& x, const LinearWeight& w);
void CheckLinearResult(const ConstMatrix& x, const Matrix& y, int64_t cols);
void CheckLowRank(const LinearWeight& w, std::span<const kernels::LowRank> low_rank);

// The arguments for these rows and panels of x * w^T; only the result's address is missing.
kernels::GemmArgs GemmArgsOf(const ConstMatrix& x, const LinearWeight& w, Range rows, Range panels,
                             std::span<const kernels::LowRank> low_rank);

}  // namespace allspark::internal
