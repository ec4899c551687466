// What products share: their checks, the observer, their counts. Private to ops/.
#pragma once

#include <span>

#include "ops/linear.h"

namespace allspark::internal {

// Shows the input of a product that has rows to the context's observer.
inline void Observe(const OpContext& context, const LinearWeight& w, const ConstMatrix& x) {
  if (context.observer != nullptr) context.observer->See(w, x);
}

// Counts one product with `rows` rows.
void CountLinear(const LinearWeight& w, int64_t rows, OpTimer& timer);
void CheckLinear(const OpContext& context, const ConstMatrix& x, const LinearWeight& w);
void CheckLinearResult(const ConstMatrix& x, const Matrix& y, int64_t cols);
// All of a product whose y has `cols` columns; y may have any dtype.
void CheckProduct(const OpContext& context, const ConstMatrix& x, const LinearWeight& w,
                  const Matrix& y, int64_t cols, std::span<const kernels::LowRank> low_rank);

// Whether the device computes the product with its activation in one pass, so that gate and up need
// not be written to memory. `gated`: the weight's rows are gate, then up.
bool IsFused(const OpContext& context, const ConstMatrix& x, const LinearWeight& w, bool gated);

}  // namespace allspark::internal
