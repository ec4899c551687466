// ModelInstance's step thread: mail, plan, forward, sample, deliver. Between warm-up and stop
// nothing here allocates (tests/cpp/engine counts).

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "engine/error_text.h"
#include "engine/model_instance.h"

namespace allspark {
namespace {

// How long the thread waits for a mask before it looks for mail, if it has nothing else to compute.
constexpr int64_t kMaskSliceUs = 1000;

}  // namespace

void ModelInstance::StepLoop() {
  pthread_setname_np(pthread_self(), "allspark-step");
  device_.pool->KeepCallerOffWorkers();
  if (hook_ != nullptr) hook_(hook_context_, StepEvent{.phase = StepPhase::kLoopBegin});
  while (TakeMail()) {
    if (running_->has_memory) RunStep();
  }
  EndAll(FinishReason::kCancelled, "");
  // The notify stays under the lock: once it is released, Stop may destroy this object.
  std::lock_guard lock(mutex_);
  FailStepCallsLocked();
  loop_running_ = false;
  loop_ended_.notify_all();
}

bool ModelInstance::HasWork() const {
  const Scheduler& scheduler = *running_->scheduler;
  return running_->has_memory && scheduler.num_waiting() + scheduler.num_running() > 0;
}

void ModelInstance::AwaitMail(std::unique_lock<std::mutex>& lock) {
  const auto is_there = [&] {
    return new_head_ != nullptr || stop_head_ != nullptr || step_calls_ != nullptr || stopping_ ||
           HasWork();
  };
  // With memory, requests are work, and the loop sees their deadlines. Without it, only this wait
  // does.
  if (running_->has_memory || deadlines_.empty()) {
    mail_.wait(lock, is_there);
  } else {
    const std::chrono::microseconds deadline(deadlines_.begin()->first);
    mail_.wait_until(lock, std::chrono::steady_clock::time_point(deadline), is_there);
  }
}

bool ModelInstance::TakeMail() {
  Request* added = nullptr;
  Request* stopped = nullptr;
  StepCall* step_calls = nullptr;
  {
    std::unique_lock lock(mutex_);
    AwaitMail(lock);
    std::swap(added, new_head_);
    new_tail_ = nullptr;
    std::swap(stopped, stop_head_);
    if (stopping_ && (stop_mode_ == StopMode::kCancel || (added == nullptr && !HasWork()))) {
      // The requests that were taken join the scheduler, so that EndAll finds them.
      for (; added != nullptr; added = added->next_new) AddToScheduler(added);
      DropStops(stopped);
      return false;
    }
    std::swap(step_calls, step_calls_);
  }
  AnswerStepCalls(step_calls);
  while (added != nullptr) {
    // Read first: a request that ends here may be gone afterwards.
    Request* next = added->next_new;
    try {
      AddToScheduler(added);
    } catch (const std::exception& error) {
      EndRequest(added, FinishReason::kError, ErrorText("", error.what()));
    }
    added = next;
  }
  for (Request* request = stopped; request != nullptr; request = request->next_stop) {
    EndRequest(request, FinishReason::kCancelled, "");
  }
  DropStops(stopped);
  EndExpired();
  return true;
}

void ModelInstance::RunStep() {
  Running& running = *running_;
  Scheduler& scheduler = *running.scheduler;
  const std::vector<PlannedChunk>* plan = nullptr;
  running.step = {.begin_us = SteadyNowUs()};
  ReleaseHeld(running.step.begin_us);
  try {
    OfferDrafts();
    // Planned again after interruptions: the plan may contain members of a group that has just
    // ended, or wait for blocks that they were to fill.
    do {
      plan = &scheduler.Plan(SteadyNowUs());
    } while (EndInterrupted());
    AS_CHECK(!plan->empty() || scheduler.num_running() <= running.num_held)
        << "nothing was planned for " << scheduler.num_running() << " running sequences, of which "
        << running.num_held << " are held";
  } catch (const std::exception& error) {
    // The scheduler's own state is in doubt: no request in it can be served.
    EndAll(FinishReason::kError, ErrorText("scheduling failed: ", error.what()));
    return;
  }
  if (plan->empty()) {
    if (scheduler.num_running() > 0) {
      ReleaseHeld(SteadyNowUs() + kMaskSliceUs);
    } else if (scheduler.first_waiting() != nullptr) {
      // Nothing runs and the first in line cannot be admitted: it never will be.
      EndRequest(static_cast<Request*>(scheduler.first_waiting()), FinishReason::kInterrupted,
                 "the KV cache cannot hold this request");
    }
    return;
  }
  try {
    CopyBlocks();
  } catch (const std::exception& error) {
    // The contents of the blocks are in doubt: no request that holds some can be served.
    EndAll(FinishReason::kError, ErrorText("copying of KV blocks failed: ", error.what()));
    scheduler.prefix_cache().Clear();
    return;
  }
  running.in_step = true;
  try {
    DraftTokens(*plan);
    Batch batch;
    BuildBatch(*plan, batch);
    batch.profile = op_profile_.get();
    running.arena.Reset();
    auto* logits = static_cast<float*>(running.logits_buffer.data());
    running.step.planned_us = SteadyNowUs();
    running.decoder->Forward(batch, running.kv, running.arena, logits);
    running.step.computed_us = SteadyNowUs();
    scheduler.Commit();
    CountStep(*plan);
    WriteOutputs(batch.num_logits_rows);
    running.step.written_us = SteadyNowUs();
    SampleAndAppend();
    EndStep();
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
  // Without room the scheduler grants no drafts, so none are offered.
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

void ModelInstance::OrderChunks(const std::vector<PlannedChunk>& plan) {
  std::vector<const PlannedChunk*>& chunks = running_->chunks;
  chunks.clear();
  bool any_lora = false;
  for (const PlannedChunk& chunk : plan) {
    chunks.push_back(&chunk);
    any_lora = any_lora || static_cast<const Request*>(chunk.sequence)->lora != nullptr;
  }
  if (!any_lora) return;
  // The salt identifies the adapter; chunks of one adapter stay in the plan's order.
  std::sort(chunks.begin(), chunks.end(), [](const PlannedChunk* a, const PlannedChunk* b) {
    return std::pair(a->sequence->cache_salt, a) < std::pair(b->sequence->cache_salt, b);
  });
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
  OrderChunks(plan);
  for (const PlannedChunk* planned : running.chunks) {
    const PlannedChunk& chunk = *planned;
    auto* request = static_cast<Request*>(chunk.sequence);
    const int64_t num_cached = chunk.begin - request->num_computed;
    statistics_.OnPrefixHit(num_cached);
    // Only while a prompt is computed for the first time.
    if (request->num_tokens == request->prompt_length && request->num_preemptions == 0) {
      if (request->scheduled_us == 0 && request->stands_for_all()) {
        statistics_.OnScheduled(now_us - request->arrival_us());
      }
      // Without a host copier the device's memory is the host's, so all cached tokens are there.
      request->OnScheduled(now_us, num_cached,
                           device_.host_copier != nullptr ? request->num_restored : num_cached);
    }
    AS_CHECK(num_tokens + chunk.num_tokens <= decoder_options_.max_tokens)
        << "the plan exceeds the step's token budget";
    for (int64_t i = 0; i < chunk.num_tokens; ++i) {
      const auto slot = static_cast<size_t>(num_tokens + i);
      running.tokens[slot] = request->KnownOrDrafted(chunk.begin + i);
      running.positions[slot] = static_cast<int32_t>(chunk.begin + i);
    }
    BatchSequence sequence{
        .token_begin = num_tokens,
        .num_tokens = chunk.num_tokens,
        .position = chunk.begin,
        .block_table = request->block_table.data(),
        .lora = request->lora != nullptr ? request->lora->adapter.get() : nullptr};
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
  // All weights have been read by now, and no request has been given anything yet.
  const Status weights = CheckWeights();
  if (!weights.ok()) throw std::runtime_error(weights.message());
  for (Request* request : running.prompts) EndRequest(request, FinishReason::kLength, "");
}

void ModelInstance::SampleAndAppend() {
  Running& running = *running_;
  AwaitMasks();
  running.step.masked_us = SteadyNowUs();
  // One round for every accepted draft: the row of logits behind it then gives the next token.
  running.changed.clear();
  while (!running.rows.empty()) {
    ReportLogits();
    {
      const OpTimer timer(op_profile_.get(), Op::kSampling);
      running.sampler->Sample(running.rows.data(), static_cast<int64_t>(running.rows.size()));
    }
    const int64_t now_us = SteadyNowUs();
    size_t num_next = 0;
    for (size_t i = 0; i < running.rows.size(); ++i) {
      Request* request = running.sampled[i];
      // It ended with another member of its group.
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
      statistics_.OnAcceptedDraft();
      running.rows[num_next] = request->NextRow(running.rows[i].logits + limits_.vocab_size);
      running.sampled[num_next++] = request;
    }
    running.rows.resize(num_next);
    running.sampled.resize(num_next);
  }
  running.step.sampled_us = SteadyNowUs();
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
  statistics_.OnToken();
  CountToken(*request, now_us);
  request->Deliver(row.token, now_us);
  if (reason != FinishReason::kNone) {
    request->EndDrafts();
    EndRequest(request, reason, "");
    return false;
  }
  if (request->mask != nullptr) request->mask->Next(row.token);
  return true;
}

void ModelInstance::FailStep(const std::vector<PlannedChunk>& plan, const char* message) {
  AS_LOG(kError) << "model '" << config_.model_name << "': a step failed: " << message;
  for (const PlannedChunk& chunk : plan) {
    // A request that ended before the exception is gone already (state kNone).
    if (chunk.sequence->state == ScheduledSequence::State::kNone) continue;
    EndRequest(static_cast<Request*>(chunk.sequence), FinishReason::kError, ErrorText("", message));
  }
}

void ModelInstance::EndRequest(Request* request, FinishReason reason, const std::string& error) {
  if (request->is_sample() && IsOutput(reason) && !EndSample(request, reason)) return;
  if (request->group != nullptr) request = request->group->first();
  {
    std::lock_guard lock(mutex_);
    if (request->ended) return;
    request->ended = true;
    admission_.Leave(request->share());
    if (request->deadline_us != kNoDeadline) {
      deadlines_.erase({request->deadline_us, request});
    }
  }
  RemoveFromScheduler(request);
  const int64_t now_us = SteadyNowUs();
  CountEnd(*request, reason, now_us);
  request->Finish(reason, error, now_us);
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

}  // namespace allspark
