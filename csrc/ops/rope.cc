#include "ops/rope.h"

#include "ops/op_check.h"

namespace allspark {

void Rope(const OpContext& context, const Matrix& x, int64_t heads, int64_t head_dim,
          const int32_t* positions, const RopeView& rope) {
  const OpTimer timer(context.profile, Op::kRope);
  internal::CheckFloats("rope", "x", x);
  internal::CheckHas("rope", context, x.dtype, OpKind::kRope);
  AS_CHECK(rope.cos_sin != nullptr && rope.rotary_dim > 0 && rope.rotary_dim % 2 == 0 &&
           rope.rotary_dim <= head_dim)
      << "rope: rotary_dim is " << rope.rotary_dim << "; head_dim is " << head_dim;
  AS_CHECK(heads > 0 && (heads - 1) * head_dim + rope.rotary_dim <= x.cols)
      << "rope: " << heads << " heads of " << head_dim << " elements; x has " << x.cols
      << " columns";
  AS_CHECK(positions != nullptr || x.rows == 0) << "rope: no positions";
  context.ops->Rope(x, heads, head_dim, positions, rope);
}

}  // namespace allspark
