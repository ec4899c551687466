// What the requests of one step get besides the tokens chosen for them: log-probabilities of prompt
// tokens, and rows of their OutputTensors. The step thread notes each chunk while it builds the
// batch, and writes everything between the forward pass and the sampler, which changes logits.
// Logits that no token is sampled from are computed a slice of rows at a time, so that a prompt of
// any length needs a buffer of a few rows. After construction nothing allocates.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/logits_buffer.h"
#include "engine/request.h"
#include "kernels/kernel_table.h"
#include "model/decoder.h"
#include "platform/thread_pool.h"
#include "sampling/logprobs.h"
#include "scheduler/scheduler.h"

namespace allspark {

class StepOutputs {
 public:
  // max_logits_rows: of the buffer that Write gets.
  StepOutputs(int64_t max_batch, int64_t max_tokens, int64_t max_logits_rows,
              const kernels::KernelTable& kernels);

  void Clear();
  // The chunk's tokens begin at `token_begin` in the batch. `sampled`: where the logits of its
  // newest known token will be, followed by those of its drafts; null if the chunk samples nothing.
  void Add(Request* request, const PlannedChunk& chunk, int64_t token_begin, const float* sampled);
  // Rows of `logits` from first_row on, at least one, are free. Call right after Forward, before
  // the arena is reset.
  void Write(Decoder& decoder, ThreadPool& pool, LogitsBuffer& logits, int64_t first_row);

 private:
  // The positions of one request that are new in this step.
  struct Part {
    Request* request;
    int64_t begin, end;    // positions, those of drafts included
    int64_t token_begin;   // of `begin` in the batch
    const float* sampled;  // as in Add
    int64_t sampled_begin;
  };
  // A row of logits that no token is sampled from.
  struct Row {
    Request* request;
    int64_t position;
  };

  void WriteStates(const Part& part, Decoder& decoder, LogitsBuffer& logits);
  // Sets scores_[index] and keeps the logits, where wanted.
  void WriteRow(const Row& row, const float* logits, int64_t vocab_size, size_t index);

  const kernels::KernelTable& kernels_;
  std::vector<Part> parts_;
  std::vector<Row> rows_;
  std::vector<int64_t> row_tokens_;  // by row: its token's place in the batch
  std::vector<RowLogprobs> scores_;  // of a slice
};

}  // namespace allspark
