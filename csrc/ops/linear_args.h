// What Linear and LinearEach have in common. Private to ops/.
#pragma once

#include <span>

#include "ops/linear.h"

namespace allspark::internal {

// Multiply-adds below which one thread is faster than a parallel region.
inline constexpr int64_t kSerialLinearWork = 1 << 16;
// Parts of a thread's share: enough that a thread which is late gives some away, few that panels
// still follow each other.
inline constexpr int64_t kLinearItemsPerThread = 8;

struct Range {
  int64_t begin;
  int64_t end;
};

// Of one product with `rows` rows.
void CountLinear(const LinearWeight& w, int64_t rows, OpTimer& timer);
void CheckLinear(const OpContext& context, const ConstMatrix& x, const LinearWeight& w);
void CheckLinearResult(const ConstMatrix& x, const Matrix& y, int64_t cols);
void CheckLowRank(const LinearWeight& w, std::span<const kernels::LowRank> low_rank);

// Of these rows and panels of x * w^T; lacks only where the result goes.
kernels::GemmArgs GemmArgsOf(const ConstMatrix& x, const LinearWeight& w, Range rows, Range panels,
                             std::span<const kernels::LowRank> low_rank);

}  // namespace allspark::internal
