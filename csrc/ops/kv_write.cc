#include "ops/kv_write.h"

#include "base/int_math.h"
#include "ops/op_check.h"

namespace allspark {
namespace {

// Every block size is a multiple of this, and so is every token group of the cache's layout.
constexpr int64_t kTokenGranule = 16;

// Moves a cut between two threads' rows up to the start of a granule, or to the sequence's end.
// Both threads at a cut compute the same position, so each token is written exactly once.
int64_t AlignCut(const SequenceRange& sequence, int64_t row) {
  const int64_t offset = std::clamp<int64_t>(row - sequence.token_begin, 0, sequence.num_tokens);
  if (offset == 0 || offset == sequence.num_tokens) return offset;
  const int64_t position = sequence.position + offset;
  const int64_t aligned = AlignUp(position, kTokenGranule);
  return std::min(aligned - sequence.position, sequence.num_tokens);
}

void CheckKvWrite(const OpContext& context, const kernels::PagedKv& kv, DType dtype,
                  const ConstMatrix& k, const ConstMatrix& v, int64_t kv_heads, int64_t head_dim) {
  internal::CheckMatrix("kv_write", "k", k);
  internal::CheckMatrix("kv_write", "v", v);
  internal::CheckDType("kv_write", "k", k.dtype, DType::kFloat32);
  internal::CheckDType("kv_write", "v", v.dtype, DType::kFloat32);
  AS_CHECK(k.rows == v.rows && k.ld == v.ld)
      << "kv_write: k has " << k.rows << " rows of stride " << k.ld << ", v has " << v.rows
      << " of stride " << v.ld;
  AS_CHECK(kv_heads > 0 && head_dim > 0 && k.cols == kv_heads * head_dim && v.cols == k.cols)
      << "kv_write: k has " << k.cols << " columns, v has " << v.cols << "; expected " << kv_heads
      << " heads of " << head_dim;
  AS_CHECK(kv.pool != nullptr && kv.block_size >= kTokenGranule &&
           kernels::kAttentionChunk % kv.block_size == 0)
      << "kv_write: block_size is " << kv.block_size << "; it must divide "
      << kernels::kAttentionChunk << " and be " << kTokenGranule << " or more";
  internal::CheckKernel("kv_write", dtype,
                        context.kernels->kv_write[internal::Slot(dtype)] != nullptr, context);
}

}  // namespace

void KvWrite(const OpContext& context, const kernels::PagedKv& kv, DType dtype,
             const SequenceRange* sequences, int64_t num_sequences, const ConstMatrix& k,
             const ConstMatrix& v, int64_t kv_heads, int64_t head_dim) {
  const OpTimer timer(context.profile, Op::kKvWrite);
  CheckKvWrite(context, kv, dtype, k, v, kv_heads, head_dim);
  int64_t rows = 0;
  for (int64_t s = 0; s < num_sequences; ++s) {
    AS_CHECK(sequences[s].token_begin == rows && sequences[s].num_tokens >= 0)
        << "kv_write: sequence " << s << " begins at row " << sequences[s].token_begin
        << "; expected " << rows;
    rows += sequences[s].num_tokens;
  }
  AS_CHECK(rows == k.rows) << "kv_write: the sequences have " << rows << " tokens, k has " << k.rows
                           << " rows";
  const auto kernel = context.kernels->kv_write[internal::Slot(dtype)];
  const auto write = [&](int64_t begin, int64_t end, int) {
    for (int64_t s = 0; s < num_sequences; ++s) {
      const SequenceRange& sequence = sequences[s];
      const int64_t first = AlignCut(sequence, begin);
      const int64_t last = AlignCut(sequence, end);
      if (first >= last) continue;
      kernels::KvWriteArgs args{};
      args.kv = kv;
      args.block_table = sequence.block_table;
      args.k = static_cast<const float*>(internal::RowAt(k, sequence.token_begin + first));
      args.v = static_cast<const float*>(internal::RowAt(v, sequence.token_begin + first));
      args.ld = k.ld;
      args.num_tokens = last - first;
      args.begin_position = sequence.position + first;
      args.kv_heads = kv_heads;
      args.head_dim = head_dim;
      kernel(args, context.stream);
    }
  };
  context.pool->ParallelFor(rows, internal::RowGrain(2 * k.cols), write);
}

}  // namespace allspark
