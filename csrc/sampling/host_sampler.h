// HostSampler: samples from logits in the host's memory. Rows are split over the pool.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/kernel_table.h"
#include "platform/thread_pool.h"
#include "sampling/sampler.h"
#include "sampling/token_choice.h"

namespace allspark {

class HostSampler final : public Sampler {
 public:
  // Takes up to 12 bytes x vocab_size per thread of the pool (null: one thread, the caller), which
  // are in use only once rows need them: greedy rows need none. `kernels` and `pool` must outlive
  // it. Requires: the table has argmax and sum_exp.
  HostSampler(int64_t vocab_size, const kernels::KernelTable& kernels, ThreadPool* pool);
  void Sample(SamplingRow* rows, int64_t num_rows) override;

 private:
  void SampleRow(SamplingRow& row, int thread);
  void RankRow(SamplingRow& row, int thread);
  void Process(const SamplingRow& row) const;
  // The row as it is: no token with any probability gives -1.
  int32_t Choose(const SamplingRow& row, TokenCandidate* scratch) const;
  int32_t ArgMax(const float* logits) const;

  int64_t vocab_size_;
  const kernels::KernelTable& kernels_;
  ThreadPool* pool_;
  // One row of vocab_size per thread each.
  std::unique_ptr<TokenCandidate[]> scratch_;
  std::unique_ptr<float[]> raw_logits_;
};

}  // namespace allspark
