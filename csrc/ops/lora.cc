#include "ops/lora.h"

#include "ops/op_check.h"

namespace allspark {
namespace {

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

void CheckAdapter(const OpContext& context, DType dtype) {
  internal::CheckHas("lora", context, dtype, OpKind::kLinear, dtype, dtype);
}

// Appends the low-rank products of one range's rows, part by part.
void AppendParts(const LoraRows& range, const LoraScratch& scratch,
                 std::vector<kernels::LowRank>& low_rank) {
  const LoraWeight& w = *range.weight;
  for (const LoraPart& part : w.parts) {
    AS_CHECK(low_rank.size() < low_rank.capacity()) << "lora: no room for a part";
    const auto* low = static_cast<const unsigned char*>(scratch.low.data);
    low_rank.push_back({range.row_begin, range.row_begin + range.num_rows, part.panel_begin,
                        part.panel_end, low + part.rank_begin * ElementBytes(w.dtype),
                        scratch.low.ld, part.b, part.rank, w.dtype});
  }
}

}  // namespace

void ShrinkLora(const OpContext& context, const ConstMatrix& x, std::span<LoraRows> rows,
                const LoraScratch& scratch, std::vector<kernels::LowRank>& low_rank) {
  low_rank.clear();
  if (rows.empty()) return;
  const OpTimer timer(context.profile, Op::kAdapters);
  internal::CheckMatrix("lora", "x", x);
  const DType dtype = scratch.low.dtype;
  for (const LoraRows& range : rows) {
    CheckRows(range, scratch, x.rows);
    AS_CHECK(range.weight->k == x.cols)
        << "lora: x has " << x.cols << " columns; the adapter reads " << range.weight->k;
    AS_CHECK(x.dtype == range.weight->dtype || x.dtype == DType::kInt8)
        << "lora: x is " << DTypeName(x.dtype) << ", the adapter "
        << DTypeName(range.weight->dtype);
    AppendParts(range, scratch, low_rank);
  }
  AS_CHECK(x.dtype != DType::kInt8 || (scratch.wide.rows >= x.rows && scratch.wide.cols >= x.cols))
      << "lora: no room to widen x";
  CheckAdapter(context, dtype);
  internal::CheckHas("lora", context, dtype, OpKind::kLowRank, dtype);
  context.ops->ShrinkLora(x, rows, scratch);
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
  }
  CheckAdapter(context, scratch.low.dtype);
  context.ops->AddLoraEmbedding(ids, rows, scratch, y);
}

}  // namespace allspark
