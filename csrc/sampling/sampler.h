// Chooses the next token of each row: logits processors, masks, then greedy or a draw. A row's
// result depends on its own logits, tokens, parameters, seed and position alone (Philox4x32-10
// keyed by seed, counter = position), so it is the same under any load and for any number of
// threads. Rows are split over the pool. The step thread calls it. After construction nothing
// allocates. What a draw keeps is in token_choice.h.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernel_table.h"
#include "platform/thread_pool.h"
#include "sampling/logits_processors.h"
#include "sampling/logprobs.h"
#include "sampling/token_choice.h"

namespace allspark {

struct SamplingParams {
  bool greedy = true;        // the highest logit, the lowest id among equals
  float temperature = 1.0f;  // below 1e-5: greedy
  int32_t top_k = 0;         // 0: all
  float top_p = 1.0f;        // 1: all
  float min_p = 0.0f;        // 0: all
  uint64_t seed = 0;
};

struct SamplingRow {
  const SamplingParams* params = nullptr;
  float* logits = nullptr;  // [vocab], may be overwritten
  int64_t position = 0;     // of the token being chosen
  // Null: none. Otherwise the next fields are set: the tokens so far (`position` of them), the
  // state of its bad words after them and, if it needs them, counts.
  const LogitsProcessors* processors = nullptr;
  const int32_t* tokens = nullptr;
  int32_t bad_word_state = WordMatcher::kStart;
  const TokenCounts* counts = nullptr;
  // Tokens that may not be chosen now (EOS before min_length), and their number.
  const int32_t* banned = nullptr;
  int64_t num_banned = 0;
  // Bit i % 32 of word i / 32 is off where token i may not be chosen; null: all may.
  const uint32_t* mask = nullptr;
  RowLogprobs* logprobs = nullptr;  // filled; null: not asked for
  // If set, it is filled and no token is chosen; of `logprobs`, only the top is filled. Null: a
  // token is chosen.
  RowCandidates* candidates = nullptr;
  int32_t token = -1;  // result; -1 when no allowed token has a finite logit
};

class Sampler {
 public:
  // Takes 12 bytes x vocab_size per thread of the pool (null: one thread, the caller). `kernels`
  // and `pool` must outlive it. Requires: the table has argmax and sum_exp.
  Sampler(int64_t vocab_size, const kernels::KernelTable& kernels, ThreadPool* pool);
  // Sets each row's token. A banned id outside the vocabulary throws InternalError.
  void Sample(SamplingRow* rows, int64_t num_rows);

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
  std::vector<TokenCandidate> scratch_;
  std::vector<float> raw_logits_;
};

}  // namespace allspark
