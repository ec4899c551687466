// Chooses the next token of each row: processors, then greedy or a draw. A row's result depends on its own
// logits, parameters, seed and position alone (Philox4x32-10 keyed by seed, counter = position), so it is the same
// under any load. After construction nothing allocates.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernel_table.h"
#include "platform/thread_pool.h"

namespace allspark {

struct SamplingParams {
  bool greedy = true;
  float temperature = 1.0f;
  int32_t top_k = 0;        // 0: all
  float top_p = 1.0f;
  uint64_t seed = 0;
};

struct SamplingRow {
  const SamplingParams* params = nullptr;
  float* logits = nullptr;      // [vocab], may be overwritten
  int64_t position = 0;         // of the token being chosen
  // Tokens that may not be chosen now (EOS before min_length), and their number.
  const int32_t* banned = nullptr;
  int64_t num_banned = 0;
  int32_t token = -1;           // result; -1 when no token has a finite logit
};

class Sampler {
 public:
  Sampler(int64_t vocab_size, const kernels::KernelTable& kernels, ThreadPool* pool);
  void Sample(SamplingRow* rows, int64_t num_rows);

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };
  void SampleRow(SamplingRow& row, Candidate* scratch) const;

  int64_t vocab_size_;
  const kernels::KernelTable& kernels_;
  ThreadPool* pool_;
  std::vector<Candidate> scratch_;  // one row of vocab_size per thread
};

}  // namespace allspark
