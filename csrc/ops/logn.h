// LogN: log-n attention. Queries at positions beyond the trained length are scaled in proportion to
// the logarithm of the number of keys they see, so that attention stays as sharp as within that
// length (Su 2021; Qwen's use_logn_attn).
#pragma once

#include "ops/op_context.h"

namespace allspark {

// x: [rows, cols] float32, in place: row r times log(positions[r] + 1) / log(trained_length) where
// positions[r] + 1 > trained_length > 1.
void LogN(const OpContext& context, const int32_t* positions, int64_t trained_length,
          const Matrix& x);

}  // namespace allspark
