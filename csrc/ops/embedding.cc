#include "ops/embedding.h"

#include "ops/op_check.h"

namespace allspark {

void EmbeddingLookup(const OpContext& context, const EmbeddingWeight& table, const int32_t* ids,
                     const Matrix& out, bool accumulate) {
  const OpTimer timer(context.profile, Op::kEmbedding);
  internal::CheckMatrix("embedding", "out", out);
  internal::CheckDType("embedding", "out", out.dtype, DType::kFloat32);
  AS_CHECK(table.data != nullptr) << "embedding: no table";
  AS_CHECK(!accumulate || !table.packed) << "embedding: rows of a packed table are not added";
  AS_CHECK(table.cols == out.cols)
      << "embedding: the table has " << table.cols << " columns, out has " << out.cols;
  if (IsQuantized(table.dtype)) {
    internal::CheckScales("embedding", table.scales, table.dtype, table.cols);
  }
  const auto kernel = context.kernels->embedding[internal::Slot(table.dtype)];
  internal::CheckKernel("embedding", table.dtype, kernel != nullptr, context);
  for (int64_t row = 0; row < out.rows; ++row) {
    AS_CHECK(ids[row] >= 0 && ids[row] < table.vocab)
        << "embedding: token " << row << " is id " << ids[row] << "; it must be in [0, "
        << table.vocab << ")";
  }
  context.pool->ParallelFor(out.rows, internal::RowGrain(out.cols),
                            [&](int64_t begin, int64_t end, int) {
                              kernels::EmbeddingArgs args{};
                              args.table = table.data;
                              args.packed = table.packed;
                              args.ids = ids + begin;
                              args.out = static_cast<float*>(internal::RowAt(out, begin));
                              args.ldo = out.ld;
                              args.rows = end - begin;
                              args.cols = out.cols;
                              args.scales = table.scales;
                              args.accumulate = accumulate;
                              kernel(args, context.stream);
                            });
}

}  // namespace allspark
