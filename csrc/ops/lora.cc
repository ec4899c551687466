#include "ops/lora.h"

#include <algorithm>
#include <cstring>

#include "base/int_math.h"
#include "ops/op_check.h"

namespace allspark {
namespace {

// Rows of one work item: enough that an adapter's matrices are read seldom, few enough that prompts
// keep every thread busy.
constexpr int64_t kBlockRows = 32;

// Rows [begin, + count) of a matrix, and their first `cols` columns.
Matrix Slice(const Matrix& x, int64_t begin, int64_t count, int64_t cols) {
  return {internal::RowAt(x, begin), x.dtype, count, cols, x.ld};
}

void CheckRows(const LoraRows& rows, const LoraScratch& scratch, int64_t num_tokens) {
  const LoraWeight& w = *rows.weight;
  AS_CHECK(rows.row_begin >= 0 && rows.num_rows > 0 && rows.num_rows <= num_tokens - rows.row_begin)
      << "lora: rows [" << rows.row_begin << ", +" << rows.num_rows << ") of " << num_tokens;
  AS_CHECK(w.rank > 0 && w.rank <= scratch.sums.cols && w.rank <= scratch.low.cols &&
           num_tokens <= scratch.sums.rows && num_tokens <= scratch.low.rows)
      << "lora: " << num_tokens << " rows of rank " << w.rank << "; there is room for "
      << scratch.sums.rows << " of " << scratch.sums.cols;
  internal::CheckDType("lora", "low", scratch.low.dtype, w.dtype);
  for (const LoraPart& part : w.parts) {
    AS_CHECK(part.rank_begin >= 0 && part.rank_begin + part.rank <= w.rank)
        << "lora: elements [" << part.rank_begin << ", +" << part.rank << ") of " << w.rank;
  }
}

// Numbers the blocks of rows of each range; returns the number of all blocks.
int64_t CountBlocks(std::span<LoraRows> rows) {
  int64_t blocks = 0;
  for (LoraRows& range : rows) {
    range.first_block = blocks;
    blocks += CeilDiv(range.num_rows, kBlockRows);
  }
  return blocks;
}

struct Block {
  const LoraWeight& weight;
  int64_t row_begin, num_rows;
};

Block BlockAt(std::span<const LoraRows> rows, int64_t block) {
  const auto after =
      std::upper_bound(rows.begin(), rows.end(), block,
                       [](int64_t b, const LoraRows& range) { return b < range.first_block; });
  const LoraRows& range = *(after - 1);
  const int64_t begin = (block - range.first_block) * kBlockRows;
  return {*range.weight, range.row_begin + begin, std::min(kBlockRows, range.num_rows - begin)};
}

// c (+)= x * w^T, on the calling thread.
void Multiply(const OpContext& context, const ConstMatrix& x, const void* w, int64_t panel_columns,
              bool accumulate, const Matrix& c) {
  kernels::GemmArgs args{};
  args.a = x.data;
  args.lda = x.ld;
  args.w = w;
  args.c = static_cast<float*>(c.data);
  args.ldc = c.ld;
  args.m = x.rows;
  args.n = c.cols;
  args.k = x.cols;
  args.panel_end = CeilDiv(c.cols, panel_columns);
  args.accumulate = accumulate;
  args.panel_columns = panel_columns;
  const auto gemm = context.kernels->gemm[internal::Slot(x.dtype)][internal::Slot(x.dtype)];
  internal::CheckKernel("lora", x.dtype, gemm != nullptr, context);
  gemm(args, context.stream);
}

// a * x of one block of rows.
void Shrink(const OpContext& context, const ConstMatrix& x, const Block& block,
            const LoraScratch& scratch) {
  const LoraWeight& w = block.weight;
  ConstMatrix in = x;
  in.data = internal::RowAt(x, block.row_begin);
  in.rows = block.num_rows;
  if (x.scale_group > 0) in.row_scale += block.row_begin * x.num_scales();
  if (x.dtype == DType::kInt8) {
    const Matrix wide = Slice(scratch.wide, block.row_begin, block.num_rows, x.cols);
    internal::ConvertRows("lora", context, in, wide);
    in = wide;
  }
  const Matrix sums = Slice(scratch.sums, block.row_begin, block.num_rows, w.rank);
  Multiply(context, in, w.a, kernels::kNarrowPanelColumns, /*accumulate=*/false, sums);
  if (w.dtype == DType::kFloat32) return;
  internal::ConvertRows("lora", context, sums,
                        Slice(scratch.low, block.row_begin, block.num_rows, w.rank));
}

// Appends the low-rank products of one range's rows, part by part.
void AppendParts(const OpContext& context, const LoraRows& range, const LoraScratch& scratch,
                 std::vector<kernels::LowRank>& low_rank) {
  const LoraWeight& w = *range.weight;
  const auto add = context.kernels->low_rank[internal::Slot(w.dtype)];
  internal::CheckKernel("lora", w.dtype, add != nullptr, context);
  for (const LoraPart& part : w.parts) {
    AS_CHECK(low_rank.size() < low_rank.capacity()) << "lora: no room for a part";
    const auto* low = static_cast<const unsigned char*>(scratch.low.data);
    low_rank.push_back({range.row_begin, range.row_begin + range.num_rows, part.panel_begin,
                        part.panel_end, low + part.rank_begin * ElementBytes(w.dtype),
                        scratch.low.ld, part.b, part.rank, add});
  }
}

}  // namespace

void ShrinkLora(const OpContext& context, const ConstMatrix& x, std::span<LoraRows> rows,
                const LoraScratch& scratch, std::vector<kernels::LowRank>& low_rank) {
  low_rank.clear();
  if (rows.empty()) return;
  const OpTimer timer(context.profile, Op::kAdapters);
  internal::CheckMatrix("lora", "x", x);
  for (const LoraRows& range : rows) {
    CheckRows(range, scratch, x.rows);
    AS_CHECK(range.weight->k == x.cols)
        << "lora: x has " << x.cols << " columns; the adapter reads " << range.weight->k;
    AS_CHECK(x.dtype == range.weight->dtype || x.dtype == DType::kInt8)
        << "lora: x is " << DTypeName(x.dtype) << ", the adapter "
        << DTypeName(range.weight->dtype);
    AppendParts(context, range, scratch, low_rank);
  }
  AS_CHECK(x.dtype != DType::kInt8 || (scratch.wide.rows >= x.rows && scratch.wide.cols >= x.cols))
      << "lora: no room to widen x";
  context.pool->ParallelForItems(CountBlocks(rows), [&](int64_t item, int) {
    Shrink(context, x, BlockAt(rows, item), scratch);
  });
}

void AddLoraEmbedding(const OpContext& context, const int32_t* ids, std::span<LoraRows> rows,
                      const LoraScratch& scratch, const Matrix& y) {
  if (rows.empty()) return;
  const OpTimer timer(context.profile, Op::kAdapters);
  internal::CheckMatrix("lora", "y", y);
  internal::CheckDType("lora", "y", y.dtype, DType::kFloat32);
  for (const LoraRows& range : rows) {
    CheckRows(range, scratch, y.rows);
    const LoraWeight& w = *range.weight;
    AS_CHECK(w.parts.size() == 1) << "lora: an embedding in " << w.parts.size() << " parts";
    for (int64_t row = range.row_begin; row < range.row_begin + range.num_rows; ++row) {
      AS_CHECK(ids[row] >= 0 && ids[row] < w.k)
          << "lora: token " << ids[row] << "; the adapter's vocabulary has " << w.k;
    }
  }
  context.pool->ParallelForItems(CountBlocks(rows), [&](int64_t item, int) {
    const Block block = BlockAt(rows, item);
    const LoraWeight& w = block.weight;
    const Matrix low = Slice(scratch.low, block.row_begin, block.num_rows, w.rank);
    const int64_t bytes = w.rank * ElementBytes(w.dtype);
    for (int64_t i = 0; i < block.num_rows; ++i) {
      std::memcpy(internal::RowAt(low, i),
                  static_cast<const unsigned char*>(w.a) + ids[block.row_begin + i] * bytes,
                  static_cast<size_t>(bytes));
    }
    Multiply(context, low, w.parts[0].b, kernels::kPanelColumns, /*accumulate=*/true,
             Slice(y, block.row_begin, block.num_rows, y.cols));
  });
}

}  // namespace allspark
