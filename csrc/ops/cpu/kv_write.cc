#include <algorithm>

#include "base/int_math.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/kv_layout.h"
#include "ops/cpu/rows.h"

namespace allspark {
namespace {

// Moves a cut between two threads' rows up to where a block may begin, and with it every token
// group of the cache's layout, or to the sequence's end. Both threads at a cut compute the same
// position, so each token is written exactly once.
int64_t AlignCut(const SequenceRange& sequence, int64_t row) {
  const int64_t offset = std::clamp<int64_t>(row - sequence.token_begin, 0, sequence.num_tokens);
  if (offset == 0 || offset == sequence.num_tokens) return offset;
  const int64_t position = sequence.position + offset;
  const int64_t aligned = AlignUp(position, kernels::kLeastBlockSize);
  return std::min(aligned - sequence.position, sequence.num_tokens);
}

}  // namespace

// Cut between tokens; within a sequence only between the groups that the cache packs together.
void CpuOps::KvWrite(const KvLayer& kv, const SequenceRanges& sequences, const ConstMatrix& k,
                     const ConstMatrix& v) {
  const KvShape& shape = kv.shape();
  const auto kernel = kernels_.kv_write[cpu::Slot(shape.dtype)];
  const kernels::PagedKv paged = cpu::PagedKvOf(kv);
  pool_.ParallelFor(k.rows, cpu::RowGrain(2 * k.cols), [&](int64_t begin, int64_t end, int) {
    for (const SequenceRange& sequence : sequences.host) {
      const int64_t first = AlignCut(sequence, begin);
      const int64_t last = AlignCut(sequence, end);
      if (first >= last) continue;
      kernels::KvWriteArgs args{};
      args.kv = paged;
      args.block_table = sequence.block_table;
      args.k = static_cast<const float*>(cpu::RowAt(k, sequence.token_begin + first));
      args.v = static_cast<const float*>(cpu::RowAt(v, sequence.token_begin + first));
      args.ld = k.ld;
      args.num_tokens = last - first;
      args.begin_position = sequence.position + first;
      args.kv_heads = shape.kv_heads;
      args.head_dim = shape.head_dim;
      kernel(args);
    }
  });
}

}  // namespace allspark
