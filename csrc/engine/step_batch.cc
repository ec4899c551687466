#include "engine/step_batch.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace allspark {

StepBatch::StepBatch(const InstalledModel& model)
    : model_(model),
      outputs_(model.config.engine_max_batch, model.sizes.decoder.max_tokens,
               model.sizes.decoder.max_logits_rows, model.device->host_kernels()) {
  const auto max_tokens = static_cast<size_t>(model.sizes.decoder.max_tokens);
  const auto max_batch = static_cast<size_t>(model.config.engine_max_batch);
  tokens_.resize(max_tokens);
  positions_.resize(max_tokens);
  chunks_.reserve(max_batch);
  sequences_.reserve(max_batch);
  rows_.reserve(max_batch);
  sampled_.reserve(max_batch);
  prompts_.reserve(max_batch);
}

void StepBatch::Order(const std::vector<PlannedChunk>& plan) {
  chunks_.clear();
  bool any_lora = false;
  for (const PlannedChunk& chunk : plan) {
    chunks_.push_back(&chunk);
    any_lora = any_lora || Request::Of(chunk.sequence)->lora != nullptr;
  }
  if (!any_lora) return;
  // The salt identifies the adapter; chunks of one adapter stay in the plan's order.
  std::sort(chunks_.begin(), chunks_.end(), [](const PlannedChunk* a, const PlannedChunk* b) {
    return std::pair(a->sequence->cache_salt, a) < std::pair(b->sequence->cache_salt, b);
  });
}

void StepBatch::Build(const std::vector<PlannedChunk>& plan, LogitsBuffer& logits) {
  sequences_.clear();
  rows_.clear();
  sampled_.clear();
  prompts_.clear();
  outputs_.Clear();
  batch_ = {.tokens = tokens_.data(), .positions = positions_.data()};
  Order(plan);
  for (const PlannedChunk* chunk : chunks_) Add(*chunk, logits);
  batch_.sequences = sequences_.data();
  batch_.num_sequences = static_cast<int64_t>(sequences_.size());
}

void StepBatch::Add(const PlannedChunk& chunk, LogitsBuffer& logits) {
  Request* const request = Request::Of(chunk.sequence);
  const int64_t token_begin = batch_.num_tokens;
  AS_CHECK(token_begin + chunk.num_tokens <= model_.sizes.decoder.max_tokens)
      << "the plan exceeds the step's token budget";
  for (int64_t i = 0; i < chunk.num_tokens; ++i) {
    const auto slot = static_cast<size_t>(token_begin + i);
    tokens_[slot] = request->KnownOrDrafted(chunk.begin + i);
    positions_[slot] = static_cast<int32_t>(chunk.begin + i);
  }
  BatchSequence sequence{.token_begin = token_begin,
                         .num_tokens = chunk.num_tokens,
                         .position = chunk.begin,
                         .block_table = request->block_table.data(),
                         .lora = request->lora != nullptr ? request->lora->adapter.get() : nullptr};
  float* const row = logits.row(batch_.num_logits_rows);
  const bool samples = chunk.samples && !request->spec.prompt_only;
  outputs_.Add(request, chunk, token_begin, samples ? row : nullptr);
  if (samples) {
    sequence.logits_row = static_cast<int32_t>(batch_.num_logits_rows);
    sequence.num_logits = static_cast<int32_t>(1 + chunk.num_drafts);
    batch_.num_logits_rows += 1 + chunk.num_drafts;
    rows_.push_back(request->NextRow(row));
    sampled_.push_back(request);
  } else if (chunk.samples) {
    prompts_.push_back(request);
  }
  sequences_.push_back(sequence);
  batch_.num_tokens += chunk.num_tokens;
}

void StepBatch::Put(size_t to, const SamplingRow& row, Request* request) {
  rows_[to] = row;
  sampled_[to] = request;
}

void StepBatch::DropEnded() {
  size_t num_kept = 0;
  for (size_t i = 0; i < num_rows(); ++i) {
    if (sampled_[i]->state == ScheduledSequence::State::kNone) continue;
    Put(num_kept++, rows_[i], sampled_[i]);
  }
  Truncate(num_kept);
}

void StepBatch::Truncate(size_t num_rows) {
  rows_.resize(num_rows);
  sampled_.resize(num_rows);
}

}  // namespace allspark
