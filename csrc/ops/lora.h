// LoRA (Hu et al. 2021): adapters add b * (a * x) to the results of a Linear. Each row of a batch
// may have an adapter of its own. The low-rank products a * x are computed here. The Linear itself
// adds b times these products to its sums, so that its result is not read and written again. A
// row's result depends on its own x and adapter alone.
#pragma once

#include <span>
#include <vector>

#include "ops/op_context.h"

namespace allspark {

// Panels [panel_begin, panel_end) of a weight's result get b times elements [rank_begin, + rank) of
// a * x.
struct LoraPart {
  int64_t panel_begin = 0;
  int64_t panel_end = 0;
  int64_t rank_begin = 0;
  int64_t rank = 0;
  const void* b = nullptr;  // [panels][rank/group][64][group]
};

// An adapter's matrices for one weight. a * x has `rank` elements: those of the parts, one after
// the other. Rank 0: the adapter does not change the weight.
struct LoraWeight {
  // [rank, k] in panels of kernels::kNarrowPanelColumns; of an embedding [k, rank], row-major.
  const void* a = nullptr;
  DType dtype = DType::kUndefined;  // of a, and of every b
  int64_t rank = 0;
  int64_t k = 0;
  std::vector<LoraPart> parts;
};

// Rows [row_begin, + num_rows) of a batch, with their adapter's matrices for the current weight.
struct LoraRows {
  int64_t row_begin = 0;
  int64_t num_rows = 0;
  const LoraWeight* weight = nullptr;
  int64_t first_block = 0;  // filled in by the op
};

// Room for the batch's rows, and the highest rank.
struct LoraScratch {
  Matrix sums;  // [rows, rank] float32: a * x
  Matrix low;   // [rows, rank] in the adapters' dtype: the input of b; where float32, `sums`
  Matrix wide;  // [rows, k] in the adapters' dtype: int8 rows of x, widened; unused otherwise
};

// Computes a * x and fills `low_rank` with the products that the Linear over x adds. Requires:
// `low_rank` has enough capacity. x: [tokens, k] in the adapters' dtype, or int8; only the Linear
// applies the single scales of int8 rows.
void ShrinkLora(const OpContext& context, const ConstMatrix& x, std::span<LoraRows> rows,
                const LoraScratch& scratch, std::vector<kernels::LowRank>& low_rank);
// y += b * (a * x) for one-hot x: a * x is row ids[i] of a. One part. y: [tokens, n] float32.
void AddLoraEmbedding(const OpContext& context, const int32_t* ids, std::span<LoraRows> rows,
                      const LoraScratch& scratch, const Matrix& y);

}  // namespace allspark
