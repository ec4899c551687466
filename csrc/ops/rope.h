// Rope: rotates query and key heads by their positions, in place.
#pragma once

#include "ops/op_context.h"

namespace allspark {

// cos_sin: [positions][rotary_dim / 2][2].
struct RopeView {
  const float* cos_sin = nullptr;
  int64_t rotary_dim = 0;
  bool interleaved = false;
};

// x: [rows, >= (heads - 1) * head_dim + rotary_dim] float32; rotates the first rotary_dim elements
// of heads [0, heads) of each row. Heads begin head_dim elements apart. positions: [rows].
// Requires: the table covers every position.
void Rope(const OpContext& context, const Matrix& x, int64_t heads, int64_t head_dim,
          const int32_t* positions, const RopeView& rope);

}  // namespace allspark
