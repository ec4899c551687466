#include "ops/kv_write.h"

#include "ops/op_check.h"

namespace allspark {
namespace {

void CheckKvWrite(const OpContext& context, const KvLayer& kv, const ConstMatrix& k,
                  const ConstMatrix& v) {
  const KvShape& shape = kv.shape();
  internal::CheckFloats("kv_write", "k", k);
  internal::CheckFloats("kv_write", "v", v);
  AS_CHECK(k.rows == v.rows && k.ld == v.ld)
      << "kv_write: k has " << k.rows << " rows of stride " << k.ld << ", v has " << v.rows
      << " of stride " << v.ld;
  AS_CHECK(shape.kv_heads > 0 && shape.head_dim > 0 && k.cols == shape.cols() && v.cols == k.cols)
      << "kv_write: k has " << k.cols << " columns, v has " << v.cols << "; expected "
      << shape.kv_heads << " heads of " << shape.head_dim;
  internal::CheckKvLayer("kv_write", kv);
  internal::CheckHas("kv_write", context, shape.dtype, OpKind::kKvWrite, shape.dtype);
}

}  // namespace

void KvWrite(const OpContext& context, const KvLayer& kv, const SequenceRanges& sequences,
             const ConstMatrix& k, const ConstMatrix& v) {
  const OpTimer timer(context.profile, Op::kKvWrite);
  CheckKvWrite(context, kv, k, v);
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
  context.ops->KvWrite(kv, sequences, k, v);
}

}  // namespace allspark
