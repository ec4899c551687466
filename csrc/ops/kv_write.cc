#include "ops/kv_write.h"

#include "ops/op_check.h"

namespace allspark {
namespace {

// Every block size is a multiple of this.
constexpr int64_t kLeastBlockSize = 16;

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
  AS_CHECK(kv.pool != nullptr && kv.block_size >= kLeastBlockSize &&
           kernels::kAttentionChunk % kv.block_size == 0)
      << "kv_write: block_size is " << kv.block_size << "; it must divide "
      << kernels::kAttentionChunk << " and be " << kLeastBlockSize << " or more";
  internal::CheckHas("kv_write", context, dtype, OpKind::kKvWrite, dtype);
}

}  // namespace

void KvWrite(const OpContext& context, const kernels::PagedKv& kv, DType dtype,
             const SequenceRanges& sequences, const ConstMatrix& k, const ConstMatrix& v,
             int64_t kv_heads, int64_t head_dim) {
  const OpTimer timer(context.profile, Op::kKvWrite);
  CheckKvWrite(context, kv, dtype, k, v, kv_heads, head_dim);
  int64_t rows = 0;
  for (size_t s = 0; s < sequences.host.size(); ++s) {
    const SequenceRange& sequence = sequences.host[s];
    AS_CHECK(sequence.token_begin == rows && sequence.num_tokens >= 0)
        << "kv_write: sequence " << s << " begins at row " << sequence.token_begin << "; expected "
        << rows;
    rows += sequence.num_tokens;
  }
  AS_CHECK(rows == k.rows) << "kv_write: the sequences have " << rows << " tokens, k has " << k.rows
                           << " rows";
  context.ops->KvWrite(kv, dtype, sequences, k, v, kv_heads, head_dim);
}

}  // namespace allspark
