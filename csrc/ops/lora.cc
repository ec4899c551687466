#include "ops/lora.h"

#include "ops/op_check.h"

namespace allspark {
namespace {

// Whether there is room for [rows, rank] of a * x as the input of b.
bool HasLow(const LoraScratch& scratch, DType dtype, int64_t rows, int64_t rank) {
  const Matrix& room = dtype == DType::kFloat32 ? scratch.sums : scratch.low.room;
  return rows <= room.rows && rank <= room.cols && ElementBytes(dtype) <= ElementBytes(room.dtype);
}

void CheckRows(const LoraRows& rows, const LoraScratch& scratch, int64_t num_tokens) {
  const LoraWeight& w = *rows.weight;
  AS_CHECK(rows.row_begin >= 0 && rows.num_rows > 0 && rows.num_rows <= num_tokens - rows.row_begin)
      << "lora: rows [" << rows.row_begin << ", +" << rows.num_rows << ") of " << num_tokens;
  AS_CHECK(w.rank > 0 && HasLow(scratch, DType::kFloat32, num_tokens, w.rank) &&
           HasLow(scratch, w.dtype, num_tokens, w.rank))
      << "lora: " << num_tokens << " rows of rank " << w.rank << " in " << DTypeName(w.dtype)
      << "; there is room for " << scratch.sums.rows << " of " << scratch.sums.cols;
  const int64_t granule = w.dtype == DType::kInt8 ? kernels::kSumBlock : 1;
  for (const LoraPart& part : w.parts) {
    AS_CHECK(part.rank_begin >= 0 && part.rank_begin + part.rank <= w.rank &&
             part.rank_begin % granule == 0 && part.rank % granule == 0)
        << "lora: elements [" << part.rank_begin << ", +" << part.rank << ") of " << w.rank;
  }
}

void CheckAdapter(const OpContext& context, DType dtype) {
  const DType stored = dtype == DType::kInt8 ? DType::kUInt8 : dtype;
  internal::CheckHas("lora", context, dtype, OpKind::kLinear, stored, dtype);
}

// Appends the low-rank products of one range's rows, part by part.
void AppendParts(const LoraRows& range, const LoraScratch& scratch,
                 std::vector<kernels::LowRank>& low_rank) {
  const LoraWeight& w = *range.weight;
  const Matrix low = LowOf(scratch, range);
  // Row 0 of the batch, as strides of this range count.
  const auto of_row_0 = [&](auto* first, int64_t stride) {
    return first - range.row_begin * stride;
  };
  for (const LoraPart& part : w.parts) {
    AS_CHECK(low_rank.size() < low_rank.capacity()) << "lora: no room for a part";
    const int64_t bytes = ElementBytes(w.dtype);
    const auto* a = of_row_0(static_cast<const unsigned char*>(low.data), low.ld * bytes);
    kernels::LowRank product{range.row_begin,
                             range.row_begin + range.num_rows,
                             part.panel_begin,
                             part.panel_end,
                             a + part.rank_begin * bytes,
                             low.ld,
                             part.b,
                             part.rank,
                             w.dtype};
    if (w.dtype == DType::kInt8) {
      const int64_t group = part.rank_begin / kernels::kSumBlock;
      product.ld_scales = low.num_scales();
      product.a_scale = of_row_0(low.row_scale, product.ld_scales) + group;
      product.ld_sums = kernels::RowSums(low.cols);
      product.a_sums = of_row_0(low.row_sums, product.ld_sums) + group;
      product.b_scale = part.b_scale;
    }
    low_rank.push_back(product);
  }
}

}  // namespace

Matrix LowOf(const LoraScratch& scratch, const LoraRows& range) {
  const DType dtype = range.weight->dtype;
  const int64_t end = range.row_begin + range.num_rows;
  Matrix low = dtype == DType::kFloat32
                   ? scratch.sums
                   : scratch.low.As({dtype, dtype == DType::kInt8 ? kernels::kSumBlock : 0});
  // First the rows, whose scales lie as far apart as those of the highest rank.
  low = RowsOf(low, range.row_begin, end);
  low.cols = range.weight->rank;
  return low;
}

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
    internal::CheckDType("lora", "x", x.dtype, range.weight->dtype);
    AppendParts(range, scratch, low_rank);
  }
  CheckAdapter(context, x.dtype);
  internal::CheckHas("lora", context, x.dtype, OpKind::kLowRank, x.dtype);
  context.ops->ShrinkLora(x, rows, scratch);
}

void AddLoraEmbedding(const OpContext& context, const int32_t* ids, std::span<LoraRows> rows,
                      const LoraScratch& scratch, const Matrix& y) {
  if (rows.empty()) return;
  const OpTimer timer(context.profile, Op::kAdapters);
  internal::CheckFloats("lora", "y", y);
  for (const LoraRows& range : rows) {
    CheckRows(range, scratch, y.rows);
    const LoraWeight& w = *range.weight;
    AS_CHECK(w.parts.size() == 1) << "lora: an embedding in " << w.parts.size() << " parts";
  }
  CheckAdapter(context, rows.front().weight->dtype);
  context.ops->AddLoraEmbedding(ids, rows, scratch, y);
}

}  // namespace allspark
