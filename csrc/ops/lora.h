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
// a * x. In int8, both are multiples of kernels::kSumBlock.
struct LoraPart {
  int64_t panel_begin = 0;
  int64_t panel_end = 0;
  int64_t rank_begin = 0;
  int64_t rank = 0;
  const void* b = nullptr;            // [panels][rank/group][64][group]
  const uint16_t* b_scale = nullptr;  // int8 only: as kernels::LowRank has it
};

// An adapter's matrices for one weight. a * x has `rank` elements: those of the parts, one after
// the other. Rank 0: the adapter does not change the weight.
struct LoraWeight {
  // [rank, k] in panels of kernels::kNarrowPanelColumns; of an embedding [k, rank], row-major. As
  // of slot uint8 in int8, with a bfloat16 scale per element of the rank.
  const void* a = nullptr;
  // Of a, and of every b: that of x. int8 adapters are weights of 8 bits, and a * x is quantised,
  // too.
  DType dtype = DType::kUndefined;
  int64_t rank = 0;
  int64_t k = 0;
  std::vector<LoraPart> parts;
  const uint16_t* a_scale = nullptr;  // int8 only: [rank]
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
  Matrix sums;           // [rows, rank] float32: a * x
  ActivationBuffer low;  // [rows, rank]: the same in the adapters' dtype, the input of b; not used
                         // by float32, which takes `sums`
};

// Rows [range.row_begin, + range.num_rows) of the input of b.
Matrix LowOf(const LoraScratch& scratch, const LoraRows& range);

// Computes a * x and fills `low_rank` with the products that the Linear over x adds. Requires:
// `low_rank` has enough capacity. x: [tokens, k] in the adapters' dtype; only the Linear applies
// the single scales of int8 rows.
void ShrinkLora(const OpContext& context, const ConstMatrix& x, std::span<LoraRows> rows,
                const LoraScratch& scratch, std::vector<kernels::LowRank>& low_rank);
// y += b * (a * x) for one-hot x: a * x is row ids[i] of a. One part. y: [tokens, n] float32.
void AddLoraEmbedding(const OpContext& context, const int32_t* ids, std::span<LoraRows> rows,
                      const LoraScratch& scratch, const Matrix& y);

}  // namespace allspark
