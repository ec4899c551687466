#include "ops/embedding.h"

#include "ops/op_check.h"

namespace allspark {

void EmbeddingLookup(const OpContext& context, const EmbeddingWeight& table, const int32_t* ids,
                     const Matrix& out, bool accumulate) {
  const OpTimer timer(context.profile, Op::kEmbedding);
  internal::CheckFloats("embedding", "out", out);
  AS_CHECK(table.data != nullptr) << "embedding: no table";
  AS_CHECK(!accumulate || !table.packed) << "embedding: rows of a packed table are not added";
  AS_CHECK(table.cols == out.cols)
      << "embedding: the table has " << table.cols << " columns, out has " << out.cols;
  if (IsQuantized(table.dtype)) {
    internal::CheckScales("embedding", table.scales, table.dtype, table.cols);
  }
  internal::CheckHas("embedding", context, table.dtype, OpKind::kEmbedding, table.dtype);
  AS_CHECK(ids != nullptr || out.rows == 0) << "embedding: no ids";
  context.ops->Embedding(table, ids, accumulate, out);
}

}  // namespace allspark
