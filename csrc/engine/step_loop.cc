// ModelInstance's step thread: mail, plan, forward, sample, deliver; and the warm-up, which runs
// the same code on made-up batches. Between warm-up and stop nothing here allocates
// (tests/cpp/engine counts).

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/int_math.h"
#include "base/log.h"
#include "engine/model_instance.h"

namespace allspark {

namespace {

// Computes a token that was generated, not the end of a prompt.
bool IsDecode(const PlannedChunk& chunk) {
  const auto* request = static_cast<const Request*>(chunk.sequence);
  return chunk.samples && chunk.num_tokens == 1 + chunk.num_drafts &&
         chunk.begin >= request->prompt_length;
}

}  // namespace

void ModelInstance::StepLoop() {
  pthread_setname_np(pthread_self(), "allspark-step");
  if (hook_ != nullptr) hook_(hook_context_, StepEvent{.phase = StepPhase::kLoopBegin});
  while (TakeMail()) RunStep();
  EndAll(FinishReason::kCancelled, "");
  // The notify stays under the lock: once it is released, Stop may destroy this object.
  std::lock_guard lock(mutex_);
  FailPrefixCallsLocked();
  loop_running_ = false;
  loop_ended_.notify_all();
}

bool ModelInstance::TakeMail() {
  Request* added = nullptr;
  Request* stopped = nullptr;
  PrefixCall* prefix_calls = nullptr;
  Scheduler& scheduler = *running_->scheduler;
  {
    std::unique_lock lock(mutex_);
    const auto has_work = [&] { return scheduler.num_waiting() + scheduler.num_running() > 0; };
    mail_.wait(lock, [&] {
      return new_head_ != nullptr || stop_head_ != nullptr || prefix_calls_ != nullptr ||
             stopping_ || has_work();
    });
    std::swap(added, new_head_);
    new_tail_ = nullptr;
    std::swap(stopped, stop_head_);
    if (stopping_ && (stop_mode_ == StopMode::kCancel || (added == nullptr && !has_work()))) {
      // What was taken joins the scheduler so that EndAll finds it.
      for (; added != nullptr; added = added->next_new) AddToScheduler(added);
      DropStops(stopped);
      return false;
    }
    std::swap(prefix_calls, prefix_calls_);
  }
  AnswerPrefixCalls(prefix_calls);
  while (added != nullptr) {
    // Read first: a request that ends here may be gone afterwards.
    Request* next = added->next_new;
    try {
      AddToScheduler(added);
    } catch (const std::exception& error) {
      EndRequest(added, FinishReason::kError, error.what());
    }
    added = next;
  }
  for (Request* request = stopped; request != nullptr; request = request->next_stop) {
    EndRequest(request, FinishReason::kCancelled, "");
  }
  DropStops(stopped);
  return true;
}

void ModelInstance::RunStep() {
  Running& running = *running_;
  Scheduler& scheduler = *running.scheduler;
  const std::vector<PlannedChunk>* plan = nullptr;
  try {
    OfferDrafts();
    plan = &scheduler.Plan(SteadyNowUs());
    AS_CHECK(!plan->empty() || scheduler.num_running() == 0)
        << "nothing was planned for " << scheduler.num_running() << " running sequences";
  } catch (const std::exception& error) {
    // The scheduler's own state is in doubt: nobody in it can be served.
    EndAll(FinishReason::kError, std::string("scheduling failed: ") + error.what());
    return;
  }
  if (plan->empty()) {
    // Nothing runs and the first in line cannot be admitted: it never will be.
    if (scheduler.first_waiting() != nullptr) {
      EndRequest(static_cast<Request*>(scheduler.first_waiting()), FinishReason::kInterrupted,
                 "the KV cache cannot hold this request");
    }
    return;
  }
  running.in_step = true;
  try {
    DraftTokens(*plan);
    Batch batch;
    BuildBatch(*plan, batch);
    running.arena.Reset();
    auto* logits = static_cast<float*>(running.logits_buffer.data());
    running.decoder->Forward(batch, running.kv, running.arena, logits);
    scheduler.Commit();
    WriteOutputs(batch.num_logits_rows);
    SampleAndAppend();
    UpdateCounters(*plan);
    if (hook_ != nullptr) hook_(hook_context_, StepEvent{.phase = StepPhase::kEnd});
  } catch (const std::exception& error) {
    FailStep(*plan, error.what());
  } catch (...) {
    FailStep(*plan, "an exception that is not a std::exception");
  }
  running.in_step = false;
  running.ended.clear();
}

void ModelInstance::OfferDrafts() {
  const Scheduler& scheduler = *running_->scheduler;
  // What the scheduler would leave out nobody need think about.
  const bool has_room = scheduler.num_running() < config_.max_draft_rows;
  for (ScheduledSequence* s = scheduler.first_running(); s != nullptr; s = s->next) {
    auto* request = static_cast<Request*>(s);
    request->ClearOffers();
    if (!has_room || !request->decodes()) continue;
    for (const auto& drafter : running_->drafters) drafter->Offer(*request);
  }
}

void ModelInstance::DraftTokens(const std::vector<PlannedChunk>& plan) {
  std::vector<Request*>& drafting = running_->drafting;
  for (const auto& drafter : running_->drafters) {
    drafting.clear();
    for (const PlannedChunk& chunk : plan) {
      auto* request = static_cast<Request*>(chunk.sequence);
      if (chunk.num_drafts > 0 && request->drafter == drafter.get()) drafting.push_back(request);
    }
    if (!drafting.empty()) drafter->Draft(drafting);
    for (Request* request : drafting) {
      request->num_drafts = static_cast<int64_t>(request->drafts.size());
    }
  }
  running_->scheduler->TrimDrafts();
}

void ModelInstance::BuildBatch(const std::vector<PlannedChunk>& plan, Batch& batch) {
  Running& running = *running_;
  running.sequences.clear();
  running.rows.clear();
  running.sampled.clear();
  running.prompts.clear();
  running.outputs->Clear();
  const int64_t now_us = SteadyNowUs();
  auto* logits = static_cast<float*>(running.logits_buffer.data());
  StepEvent event{.phase = StepPhase::kBegin};
  int64_t num_tokens = 0, num_logits_rows = 0;
  for (const PlannedChunk& chunk : plan) {
    auto* request = static_cast<Request*>(chunk.sequence);
    const int64_t num_cached = chunk.begin - request->num_computed;
    counters_.prefix_hits += num_cached;
    // Of a prompt, the first time that it is computed.
    if (request->num_tokens == request->prompt_length && request->num_preemptions == 0) {
      request->OnScheduled(now_us, num_cached);
    }
    AS_CHECK(num_tokens + chunk.num_tokens <= decoder_options_.max_tokens)
        << "the plan exceeds the step's token budget";
    for (int64_t i = 0; i < chunk.num_tokens; ++i) {
      const auto slot = static_cast<size_t>(num_tokens + i);
      running.tokens[slot] = request->KnownOrDrafted(chunk.begin + i);
      running.positions[slot] = static_cast<int32_t>(chunk.begin + i);
    }
    BatchSequence sequence{.token_begin = num_tokens,
                           .num_tokens = chunk.num_tokens,
                           .position = chunk.begin,
                           .block_table = request->block_table.data()};
    float* const row = logits + num_logits_rows * limits_.vocab_size;
    const bool samples = chunk.samples && !request->prompt_only;
    running.outputs->Add(request, chunk, num_tokens, samples ? row : nullptr);
    if (samples) {
      sequence.logits_row = static_cast<int32_t>(num_logits_rows);
      sequence.num_logits = static_cast<int32_t>(1 + chunk.num_drafts);
      num_logits_rows += 1 + chunk.num_drafts;
      running.rows.push_back(request->NextRow(row));
      running.sampled.push_back(request);
    } else if (chunk.samples) {
      running.prompts.push_back(request);
    }
    running.sequences.push_back(sequence);
    num_tokens += chunk.num_tokens;
    if (IsDecode(chunk)) {
      ++event.num_decodes;
    } else {
      event.num_prefill_tokens += chunk.num_tokens;
    }
  }
  batch = {.tokens = running.tokens.data(),
           .positions = running.positions.data(),
           .num_tokens = num_tokens,
           .sequences = running.sequences.data(),
           .num_sequences = static_cast<int64_t>(running.sequences.size()),
           .num_logits_rows = num_logits_rows};
  if (hook_ != nullptr) hook_(hook_context_, event);
}

void ModelInstance::WriteOutputs(int64_t num_logits_rows) {
  Running& running = *running_;
  auto* logits = static_cast<float*>(running.logits_buffer.data());
  running.outputs->Write(*running.decoder, *device_.pool,
                         logits + num_logits_rows * limits_.vocab_size,
                         decoder_options_.max_logits_rows - num_logits_rows);
  for (Request* request : running.prompts) EndRequest(request, FinishReason::kLength, "");
}

void ModelInstance::SampleAndAppend() {
  Running& running = *running_;
  AwaitMasks();
  // A round for every draft that turns out right: the row behind it is then the next one's.
  running.changed.clear();
  while (!running.rows.empty()) {
    ReportLogits();
    running.sampler->Sample(running.rows.data(), static_cast<int64_t>(running.rows.size()));
    const int64_t now_us = SteadyNowUs();
    size_t num_next = 0;
    for (size_t i = 0; i < running.rows.size(); ++i) {
      Request* request = running.sampled[i];
      // It ended with another one of its group.
      if (request->state == ScheduledSequence::State::kNone) continue;
      if (request->is_beam()) {
        AdvanceSearch(request, running.rows[i]);
        continue;
      }
      if (!AppendSampled(request, running.rows[i], now_us)) continue;
      if (!request->TakeDraft()) {
        if (request->group == nullptr) running.changed.push_back(request);
        continue;
      }
      running.scheduler->AcceptDraft(request);
      ++counters_.accepted;
      running.rows[num_next] = request->NextRow(running.rows[i].logits + limits_.vocab_size);
      running.sampled[num_next++] = request;
    }
    running.rows.resize(num_next);
    running.sampled.resize(num_next);
  }
  // All tokens are in their queues before the first reader wakes: one signal a step.
  for (Request* request : running.changed) request->queue->Announce();
}

void ModelInstance::ReportLogits() const {
  if (hook_ == nullptr) return;
  for (size_t i = 0; i < running_->rows.size(); ++i) {
    hook_(hook_context_, StepEvent{.phase = StepPhase::kLogits,
                                   .request_id = running_->sampled[i]->request_id,
                                   .position = running_->rows[i].position,
                                   .logits = running_->rows[i].logits,
                                   .vocab_size = limits_.vocab_size});
  }
}

bool ModelInstance::AppendSampled(Request* request, const SamplingRow& row, int64_t now_us) {
  if (row.token < 0) {
    const char* which = row.mask != nullptr ? "no token that the mask allows" : "no token";
    EndRequest(
        request, FinishReason::kError,
        std::string(which) + " has a finite logit at position " + std::to_string(row.position));
    return false;
  }
  const FinishReason reason = request->Append(row.token);
  request->Deliver(row.token, now_us);
  ++counters_.generated;
  if (reason != FinishReason::kNone) {
    request->EndDrafts();
    EndRequest(request, reason, "");
    return false;
  }
  if (request->mask != nullptr) request->mask->Next(row.token);
  return true;
}

void ModelInstance::AwaitMasks() {
  Running& running = *running_;
  const int64_t deadline_us = SteadyNowUs() + config_.token_mask_timeout_ms * 1000;
  size_t num_kept = 0;
  for (size_t i = 0; i < running.rows.size(); ++i) {
    Request* request = running.sampled[i];
    if (request->mask != nullptr && !AwaitMask(request, deadline_us, running.rows[i])) continue;
    running.rows[num_kept] = running.rows[i];
    running.sampled[num_kept++] = request;
  }
  running.rows.resize(num_kept);
  running.sampled.resize(num_kept);
}

bool ModelInstance::AwaitMask(Request* request, int64_t deadline_us, SamplingRow& row) {
  // Nobody signals a stop to this wait; it looks for one this often.
  constexpr int64_t kSliceUs = 10000;
  while (true) {
    const int64_t now_us = SteadyNowUs();
    switch (request->mask->Wait(std::min(now_us + kSliceUs, deadline_us))) {
      case MaskAnswer::kMask:
        row.mask = request->mask->words();
        return true;
      case MaskAnswer::kFinished:
        EndRequest(request, FinishReason::kStop, "");
        return false;
      case MaskAnswer::kFailed:
        EndRequest(request, FinishReason::kError, "token mask: " + request->mask->error());
        return false;
      case MaskAnswer::kNone:
        break;
    }
    if (IsStopping(*request)) {
      EndRequest(request, FinishReason::kCancelled, "");
      return false;
    }
    if (now_us >= deadline_us) {
      EndRequest(request, FinishReason::kError,
                 "the token mask of position " + std::to_string(row.position) +
                     " did not come within token_mask_timeout_ms, which is " +
                     std::to_string(config_.token_mask_timeout_ms));
      return false;
    }
  }
}

bool ModelInstance::IsStopping(const Request& request) const {
  std::lock_guard lock(mutex_);
  return request.stop_self != nullptr || (stopping_ && stop_mode_ == StopMode::kCancel);
}

void ModelInstance::FailStep(const std::vector<PlannedChunk>& plan, const std::string& message) {
  AS_LOG(kError) << "model '" << config_.model_name << "': a step failed: " << message;
  for (const PlannedChunk& chunk : plan) {
    // A request that ended before the exception is gone already (state kNone).
    if (chunk.sequence->state == ScheduledSequence::State::kNone) continue;
    EndRequest(static_cast<Request*>(chunk.sequence), FinishReason::kError, message);
  }
}

void ModelInstance::EndRequest(Request* request, FinishReason reason, std::string error) {
  if (request->is_sample() && IsOutput(reason) && !EndSample(request, reason)) return;
  if (request->group != nullptr) request = request->group->first();
  {
    std::lock_guard lock(mutex_);
    if (request->ended) return;
    request->ended = true;
    num_live_ -= request->num_live();
  }
  RemoveFromScheduler(request);
  request->Finish(reason, std::move(error), SteadyNowUs());
  std::shared_ptr<Request> self = std::move(request->self);  // may be the last reference
  if (running_->in_step) running_->ended.push_back(std::move(self));
}

void ModelInstance::EndAll(FinishReason reason, const std::string& error) {
  Scheduler& scheduler = *running_->scheduler;
  {
    // Requests posted for stopping are in the scheduler too.
    std::lock_guard lock(mutex_);
    DropStops(std::exchange(stop_head_, nullptr));
  }
  while (scheduler.first_running() != nullptr) {
    EndRequest(static_cast<Request*>(scheduler.first_running()), reason, error);
  }
  while (scheduler.first_waiting() != nullptr) {
    EndRequest(static_cast<Request*>(scheduler.first_waiting()), reason, error);
  }
}

void ModelInstance::PublishUsage() {
  const Scheduler& scheduler = *running_->scheduler;
  counters_.running = scheduler.num_running();
  const PrefixCache& cache = scheduler.prefix_cache();
  counters_.used_blocks = cache.pool().num_blocks() - cache.num_available();
  counters_.cached_blocks = cache.num_unused();
}

void ModelInstance::UpdateCounters(const std::vector<PlannedChunk>& plan) {
  const Scheduler& scheduler = *running_->scheduler;
  int64_t prefilled = 0;
  for (const PlannedChunk& chunk : plan) {
    if (!IsDecode(chunk)) prefilled += chunk.num_tokens;
    counters_.drafted += chunk.num_drafts;
  }
  const int64_t total_prefilled = counters_.prefilled += prefilled;
  const int64_t total_generated = counters_.generated.load();
  ++counters_.steps;
  counters_.preemptions = scheduler.num_preemptions();
  PublishUsage();
  const int64_t now_us = SteadyNowUs();
  const int64_t window_us = now_us - counters_.window_begin_us;
  if (window_us >= 1000000) {
    const double seconds = static_cast<double>(window_us) * 1e-6;
    counters_.generated_per_second =
        static_cast<double>(total_generated - counters_.window_generated) / seconds;
    counters_.prefilled_per_second =
        static_cast<double>(total_prefilled - counters_.window_prefilled) / seconds;
    counters_.window_begin_us = now_us;
    counters_.window_generated = total_generated;
    counters_.window_prefilled = total_prefilled;
  }
}

void ModelInstance::WarmUp(Running& running) const {
  const char* disabled = std::getenv("ALLSPARK_DISABLE_WARMUP");
  if (disabled != nullptr && std::string(disabled) == "1") return;
  auto* logits = static_cast<float*>(running.logits_buffer.data());
  // The largest prefill: one chunk from position 0, sampled.
  const int64_t chunk = chunk_tokens_;
  const int64_t blocks = CeilDiv(chunk, config_.cache_span_size);
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  for (int64_t i = 0; i < blocks; ++i) table[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  for (int64_t i = 0; i < chunk; ++i) {
    running.tokens[static_cast<size_t>(i)] = 0;
    running.positions[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  }
  BatchSequence prefill{.num_tokens = chunk, .block_table = table.data(), .logits_row = 0};
  Batch batch{.tokens = running.tokens.data(),
              .positions = running.positions.data(),
              .num_tokens = chunk,
              .sequences = &prefill,
              .num_sequences = 1,
              .num_logits_rows = 1};
  running.arena.Reset();
  running.decoder->Forward(batch, running.kv, running.arena, logits);

  // A full batch of decodes at position 0. They may share a block: nobody reads the result.
  const int64_t max_batch = config_.engine_max_batch;
  std::vector<int32_t> block_ids(static_cast<size_t>(max_batch));
  std::vector<SamplingRow> rows(static_cast<size_t>(max_batch));
  const SamplingParams sampling{.greedy = false, .top_k = 50, .top_p = 0.9f};
  running.sequences.clear();
  for (int64_t i = 0; i < max_batch; ++i) {
    const auto slot = static_cast<size_t>(i);
    running.tokens[slot] = 0;
    running.positions[slot] = 0;
    block_ids[slot] = static_cast<int32_t>(i % num_blocks_);
    running.sequences.push_back({.token_begin = i,
                                 .num_tokens = 1,
                                 .block_table = &block_ids[slot],
                                 .logits_row = static_cast<int32_t>(i)});
    rows[slot] = {.params = &sampling, .logits = logits + i * limits_.vocab_size, .position = 1};
  }
  batch.num_tokens = batch.num_sequences = batch.num_logits_rows = max_batch;
  batch.sequences = running.sequences.data();
  running.arena.Reset();
  running.decoder->Forward(batch, running.kv, running.arena, logits);
  running.sampler->Sample(rows.data(), max_batch);
  for (const auto& drafter : running.drafters) drafter->WarmUp();
}

}  // namespace allspark
