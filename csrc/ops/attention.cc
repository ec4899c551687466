#include "ops/attention.h"

#include <algorithm>
#include <limits>

#include "ops/op_check.h"

namespace allspark {
namespace {

void CheckAttention(const OpContext& context, const AttentionParams& params, const KvLayer& kv,
                    const ConstMatrix& q, const float* scratch, const Matrix& out) {
  internal::CheckFloats("attention", "q", q);
  internal::CheckMatrix("attention", "out", out);
  AS_CHECK(params.head_dim > 0 && params.kv_heads > 0 && params.q_heads >= params.kv_heads &&
           params.q_heads % params.kv_heads == 0)
      << "attention: " << params.q_heads << " query heads over " << params.kv_heads
      << " KV heads of " << params.head_dim;
  const int64_t cols = params.q_heads * params.head_dim;
  AS_CHECK(q.cols == cols && out.cols == cols && q.rows == out.rows)
      << "attention: q is [" << q.rows << ", " << q.cols << "], out is [" << out.rows << ", "
      << out.cols << "]; expected " << cols << " columns";
  // The kernels look for the highest score before they scale.
  AS_CHECK(params.scale > 0.0f) << "attention: scale is " << params.scale;
  AS_CHECK(params.window >= 0 && params.soft_cap >= 0.0f)
      << "attention: window is " << params.window << ", soft_cap is " << params.soft_cap;
  const KvShape& shape = kv.shape();
  internal::CheckKvLayer("attention", kv);
  AS_CHECK(params.kv_heads == shape.kv_heads && params.head_dim == shape.head_dim)
      << "attention: " << params.kv_heads << " KV heads of " << params.head_dim
      << "; the cache has " << shape.kv_heads << " of " << shape.head_dim;
  AS_CHECK(scratch != nullptr) << "attention: no scratch";
  AS_CHECK(context.ops->Has(OpKind::kAttention, shape.dtype, out.dtype))
      << "attention: kernel table '" << context.ops->name() << "' has no entry for a "
      << DTypeName(shape.dtype) << " cache and " << DTypeName(out.dtype) << " output";
}

// Counts the keys and values that a batch reads, and the operations on them.
void Count(const AttentionParams& params, DType kv_dtype, const SequenceRanges& sequences,
           OpTimer& timer) {
  const int64_t window = params.window > 0 ? params.window : std::numeric_limits<int64_t>::max();
  int64_t read = 0, seen = 0;
  for (const SequenceRange& sequence : sequences.host) {
    const int64_t begin = sequence.position, end = begin + sequence.num_tokens;
    if (begin == end) continue;
    read += end - begin + std::min(begin, window - 1);
    for (int64_t position = begin; position < end; ++position) {
      seen += std::min(position + 1, window);
    }
  }
  const auto bytes = [&](DType side) { return kernels::KvPartBytes(side, read, params.head_dim); };
  timer.Count(
      params.kv_heads * (bytes(kernels::KeyDType(kv_dtype)) + bytes(kernels::ValueDType(kv_dtype))),
      4 * params.q_heads * params.head_dim * seen);
}

}  // namespace

void PagedAttention(const OpContext& context, const AttentionParams& params, const KvLayer& kv,
                    const SequenceRanges& sequences, const ConstMatrix& q, float* scratch,
                    const Matrix& out) {
  OpTimer timer(context.profile, Op::kAttention);
  CheckAttention(context, params, kv, q, scratch, out);
  for (size_t s = 0; s < sequences.host.size(); ++s) {
    const SequenceRange& sequence = sequences.host[s];
    AS_CHECK(sequence.token_begin >= 0 && sequence.num_tokens >= 0 && sequence.position >= 0 &&
             sequence.token_begin + sequence.num_tokens <= q.rows)
        << "attention: sequence " << s << " has rows [" << sequence.token_begin << ", +"
        << sequence.num_tokens << ") at position " << sequence.position << "; q has " << q.rows;
  }
  if (timer.is_on()) Count(params, kv.shape().dtype, sequences, timer);
  context.ops->Attention(params, kv, sequences, q, scratch, out);
}

}  // namespace allspark
