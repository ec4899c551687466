// One step's plan as what the decoder, the sampler and the outputs need: a ragged batch, the rows
// that sample, and the requests whose prompt is complete. Reserved for the largest step; nothing
// allocates afterwards.
#pragma once

#include <vector>

#include "engine/installed_model.h"
#include "engine/logits_buffer.h"
#include "engine/request.h"
#include "engine/step_outputs.h"
#include "model/batch.h"
#include "sampling/sampler.h"
#include "scheduler/scheduler.h"

namespace allspark {

class StepBatch {
 public:
  explicit StepBatch(const InstalledModel& model);

  // `logits`: where the rows will be. Valid as long as `plan` is.
  void Build(const std::vector<PlannedChunk>& plan, LogitsBuffer& logits);

  const Batch& batch() const { return batch_; }
  StepOutputs& outputs() { return outputs_; }
  // prompt_only requests that this step completes.
  const std::vector<Request*>& prompts() const { return prompts_; }

  // The rows to sample from, and whose they are.
  size_t num_rows() const { return rows_.size(); }
  SamplingRow& row(size_t i) { return rows_[i]; }
  Request* sampled(size_t i) const { return sampled_[i]; }
  SamplingRow* rows() { return rows_.data(); }
  // Puts the row at place `to`, which is not behind its own, and drops those from num_rows on.
  void Put(size_t to, const SamplingRow& row, Request* request);
  void Truncate(size_t num_rows);
  // Drops the rows of requests that have ended: what they point to is gone.
  void DropEnded();

 private:
  // Sets chunks_.
  void Order(const std::vector<PlannedChunk>& plan);
  void Add(const PlannedChunk& chunk, LogitsBuffer& logits);

  const InstalledModel& model_;
  Batch batch_;
  std::vector<const PlannedChunk*> chunks_;  // of the plan, contiguous by adapter
  std::vector<int32_t> tokens_, positions_;
  std::vector<BatchSequence> sequences_;
  std::vector<SamplingRow> rows_;
  std::vector<Request*> sampled_;  // by row
  std::vector<Request*> prompts_;
  StepOutputs outputs_;
};

}  // namespace allspark
