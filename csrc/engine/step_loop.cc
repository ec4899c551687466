#include "engine/step_loop.h"

#include <pthread.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/int_math.h"
#include "engine/error_text.h"
#include "platform/float_mode.h"

namespace allspark {
namespace {

// What a step with decodes has, as a share of the rows of a chunk. With a quarter a stream waits a
// quarter as long for the prompts of others, whose tokens cost no more (benchmarks/notes.md).
constexpr int64_t kBalancedShare = 4;
constexpr int64_t kSmoothShare = 16;
// A prompt is long with more than so many chunks left.
constexpr int64_t kLongPrefillChunks = 8;
// With kFirstToken, how many steps in a row decodes may wait.
constexpr int64_t kMostStepsWithoutDecodes = 8;
// How long the thread waits for a mask before it looks for mail, if it has nothing else to compute.
constexpr int64_t kMaskSliceUs = 1000;

// The rows of decodes and prefill in a step that has both.
int64_t RowsBesideDecodes(PrefillPolicy policy, int64_t chunk_tokens) {
  switch (policy) {
    case PrefillPolicy::kBalanced:
      return CeilDiv(chunk_tokens, kBalancedShare);
    case PrefillPolicy::kSmooth:
      return CeilDiv(chunk_tokens, kSmoothShare);
    case PrefillPolicy::kThroughput:
    case PrefillPolicy::kFirstToken:
      break;
  }
  return 2 * chunk_tokens;  // prefill has half of them at least: a whole chunk
}

SchedulerConfig MakeSchedulerConfig(const InstalledModel& model) {
  const RuntimeConfig& config = model.config;
  const ModelSizes& sizes = model.sizes;
  const int64_t rows = RowsBesideDecodes(config.prefill_policy, sizes.chunk_tokens);
  const bool counts_depth = config.prefill_policy != PrefillPolicy::kThroughput;
  return {
      .max_batch = config.engine_max_batch,
      .chunk_tokens = sizes.chunk_tokens,
      .max_rows_beside_decodes = rows,
      .double_cost_depth = counts_depth ? sizes.double_cost_depth : 0,
      .long_prefill_tokens = kLongPrefillChunks * sizes.chunk_tokens,
      .max_steps_without_decodes =
          config.prefill_policy == PrefillPolicy::kFirstToken ? kMostStepsWithoutDecodes : 0,
      .block_size = config.block_size,
      .num_blocks = sizes.num_blocks,
      .max_draft_rows = config.max_draft_rows,
      .draft_row_cost = sizes.draft_row_cost,
      .enable_prefix_cache = config.enable_prefix_cache,
      .prefix_cache_ttl_us = config.prefix_cache_ttl * 1000000,
      .max_pinned_blocks = sizes.num_blocks - CeilDiv(config.engine_max_length, config.block_size),
      .num_host_blocks = sizes.num_host_blocks,
      .interrupts = config.interrupt_on_cache_exhaustion,
  };
}

}  // namespace

StepLoop::StepLoop(Context context)
    : context_(std::move(context)),
      model_(context_.model),
      mailbox_(context_.mailbox),
      memory_(model_),
      scheduler_(MakeSchedulerConfig(model_)),
      batch_(model_),
      reporter_(model_, context_.statistics, context_.trace, context_.stat) {
  const auto max_batch = static_cast<size_t>(model_.config.engine_max_batch);
  drafting_.reserve(max_batch);
  changed_.reserve(max_batch);
  unsignalled_.reserve(2 * max_batch);  // the engine's and an attached one
  ended_.reserve(max_batch);
}

Status StepLoop::Start() {
  AS_RETURN_IF_ERROR(memory_.Take());
  memory_.WarmUp();
  return model_.CheckWeights();
}

void StepLoop::Run() {
  pthread_setname_np(pthread_self(), "allspark-step");
  const DefaultFloatMode mode;
  Report({.phase = StepPhase::kLoopBegin});
  model_.device->host_pool().KeepCallerOffWorkers();
  while (TakeMail()) {
    if (memory_.is_taken()) RunStep();
  }
  EndAll(FinishReason::kCancelled, "");
  mailbox_.DropStops();
  mailbox_.CloseLoop();
}

bool StepLoop::HasWork() const {
  return memory_.is_taken() && scheduler_.num_waiting() + scheduler_.num_running() > 0;
}

bool StepLoop::TakeMail() {
  const Mailbox::Mail mail = mailbox_.Take(HasWork(), memory_.is_taken());
  mailbox_.Answer(mail.calls, [this] { reporter_.OnUsage(scheduler_); });
  for (Request* request = mail.added; request != nullptr;) {
    // Read first: a request that ends here may be gone afterwards.
    Request* const next = request->next_new;
    try {
      AddToScheduler(request);
    } catch (const std::exception& error) {
      EndRequest(request, FinishReason::kError, ErrorText(error.what()));
    }
    request = next;
  }
  for (Request* request = mail.stopped; request != nullptr; request = request->next_stop) {
    EndRequest(request, request->stop_reason, "");
  }
  Mailbox::DropStops(mail.stopped);
  if (mail.ends) return false;
  EndExpired();
  return true;
}

void StepLoop::RunStep() {
  const std::vector<PlannedChunk>* plan = nullptr;
  StepRecord& step = reporter_.Begin();
  ReleaseHeld(step.begin_us);
  try {
    OfferDrafts();
    // Planned again after interruptions: the plan may contain members of a group that has just
    // ended, or wait for blocks that they were to fill.
    do {
      plan = &scheduler_.Plan(SteadyNowUs());
    } while (EndInterrupted());
    // A prefill may wait for blocks of a held sequence before it.
    AS_CHECK(!plan->empty() || scheduler_.num_running() == 0 || num_held_ > 0)
        << "nothing was planned for " << scheduler_.num_running() << " running sequences";
  } catch (const std::exception& error) {
    // The scheduler's own state is in doubt: no request in it can be served.
    EndAll(FinishReason::kError, ErrorText("scheduling failed: ", error.what()));
    return;
  }
  if (plan->empty()) {
    if (scheduler_.num_running() > 0) {
      ReleaseHeld(SteadyNowUs() + kMaskSliceUs);
    } else if (scheduler_.first_waiting() != nullptr) {
      // Nothing runs and the first in line cannot be admitted: it never will be.
      EndRequest(Request::Of(scheduler_.first_waiting()), FinishReason::kInterrupted,
                 ErrorText("the KV cache cannot hold this request"));
    }
    return;
  }
  PrefixCache& cache = scheduler_.prefix_cache();
  try {
    for (const HostCopy& copy : cache.copies()) memory_.Copy(copy);
    cache.ClearCopies();
  } catch (const std::exception& error) {
    // The contents of the blocks are in doubt: no request that holds some can be served.
    EndAll(FinishReason::kError, ErrorText("copying of KV blocks failed: ", error.what()));
    cache.Clear();
    return;
  }
  in_step_ = true;
  try {
    Compute(*plan, step);
  } catch (const std::exception& error) {
    FailStep(*plan, error.what());
  } catch (...) {
    FailStep(*plan, "an exception that is not a std::exception");
  }
  in_step_ = false;
  ended_.clear();
}

void StepLoop::Compute(const std::vector<PlannedChunk>& plan, StepRecord& step) {
  Draft(plan);
  reporter_.OnPlan(plan);
  batch_.Build(plan, memory_.logits());
  Report({.phase = StepPhase::kBegin,
          .num_decodes = step.num_decodes,
          .num_prefill_tokens = step.num_prefill_tokens});
  Batch batch = batch_.batch();
  batch.profile = context_.op_profile;
  step.planned_us = SteadyNowUs();
  memory_.Forward(batch);
  step.computed_us = SteadyNowUs();
  scheduler_.Commit();
  reporter_.OnComputed(scheduler_.num_preemptions());
  WriteOutputs();
  step.written_us = SteadyNowUs();
  SampleAndAppend(step);
  reporter_.OnUsage(scheduler_);
  reporter_.End();
  Report({.phase = StepPhase::kEnd});
}

void StepLoop::OfferDrafts() {
  // Without room the scheduler grants no drafts, so none are offered.
  const bool has_room = scheduler_.num_running() < model_.config.max_draft_rows;
  for (ScheduledSequence* s = scheduler_.first_running(); s != nullptr; s = s->next) {
    Request* const request = Request::Of(s);
    request->ClearOffers();
    if (!has_room || !request->decodes()) continue;
    for (const auto& drafter : memory_.drafters()) drafter->Offer(*request);
  }
}

void StepLoop::Draft(const std::vector<PlannedChunk>& plan) {
  for (const auto& drafter : memory_.drafters()) {
    drafting_.clear();
    for (const PlannedChunk& chunk : plan) {
      Request* const request = Request::Of(chunk.sequence);
      if (chunk.num_drafts > 0 && request->drafter == drafter.get()) drafting_.push_back(request);
    }
    if (!drafting_.empty()) drafter->Draft(drafting_);
    for (Request* request : drafting_) {
      request->num_drafts = static_cast<int64_t>(request->drafts.size());
    }
  }
  scheduler_.TrimDrafts();
}

void StepLoop::WriteOutputs() {
  const int64_t num_rows = batch_.batch().num_logits_rows;
  batch_.outputs().Write(memory_.decoder(), model_.device->host_pool(), memory_.logits(), num_rows);
  // All weights have been read by now, and no request has been given anything yet.
  const Status weights = model_.CheckWeights();
  if (!weights.ok()) throw std::runtime_error(weights.message());
  for (Request* request : batch_.prompts()) EndRequest(request, FinishReason::kLength, "");
}

void StepLoop::SampleAndAppend(StepRecord& step) {
  AwaitMasks(step.computed_us - step.planned_us);
  step.masked_us = SteadyNowUs();
  // One round for every accepted draft: the row of logits behind it then gives the next token.
  changed_.clear();
  while (batch_.num_rows() > 0) {
    ReportLogits();
    {
      const OpTimer timer(context_.op_profile, Op::kSampling);
      memory_.sampler().Sample(batch_.rows(), static_cast<int64_t>(batch_.num_rows()));
    }
    const int64_t now_us = SteadyNowUs();
    size_t num_next = 0;
    for (size_t i = 0; i < batch_.num_rows(); ++i) {
      Request* const request = batch_.sampled(i);
      const SamplingRow& row = batch_.row(i);
      // It ended with another member of its group.
      if (request->state == ScheduledSequence::State::kNone) continue;
      if (request->is_beam()) {
        AdvanceSearch(request, row);
        continue;
      }
      if (!AppendSampled(request, row, now_us)) continue;
      if (!request->TakeDraft()) {
        if (request->group == nullptr) changed_.push_back(request);
        continue;
      }
      scheduler_.AcceptDraft(request);
      reporter_.OnAcceptedDraft();
      float* const next_logits = row.logits + model_.sizes.limits.vocab_size;
      batch_.Put(num_next++, request->NextRow(next_logits), request);
    }
    batch_.Truncate(num_next);
    // A request whose row was kept may have ended since, with another member of its group.
    batch_.DropEnded();
  }
  step.sampled_us = SteadyNowUs();
  // All tokens are in their queues, and all queues in their sets, before the first reader wakes.
  for (Request* request : changed_) request->queue->Announce(unsignalled_);
  for (const auto& set : unsignalled_) set->Signal();
  unsignalled_.clear();
}

bool StepLoop::AppendSampled(Request* request, const SamplingRow& row, int64_t now_us) {
  if (row.token < 0) {
    EndRequest(request, FinishReason::kError, ErrorText([&] {
                 const char* which = row.mask != nullptr ? " that the mask allows" : "";
                 return "no token" + std::string(which) + " has a finite logit at position " +
                        std::to_string(row.position);
               }));
    return false;
  }
  const FinishReason reason = request->Append(row.token);
  reporter_.OnToken(*request, now_us);
  request->Deliver(row.token, now_us);
  if (reason != FinishReason::kNone) {
    request->EndDrafts();
    EndRequest(request, reason, "");
    return false;
  }
  if (request->mask != nullptr) request->mask->Next(row.token);
  return true;
}

void StepLoop::AdvanceSearch(Request* beam, const SamplingRow& row) {
  RequestGroup& group = *beam->group;
  reporter_.OnCandidates();
  if (!group.TakeCandidates(beam)) return;
  group.Choose();
  if (!group.is_done()) {
    for (const BlockCopy& copy : scheduler_.Fork(group.sequences(), group.parents())) {
      memory_.Copy(copy);
    }
    group.Continue();
  } else if (group.has_enough()) {
    EndRequest(beam, FinishReason::kStop, "");
  } else {
    EndRequest(beam, FinishReason::kError, ErrorText([&] {
                 return "too few tokens have a finite logit up to position " +
                        std::to_string(row.position) + " for num_return_sequences, which is " +
                        std::to_string(group.returned().size());
               }));
  }
}

void StepLoop::Report(const StepEvent& event) const {
  if (context_.hook) context_.hook(event);
}

void StepLoop::ReportLogits() {
  if (!context_.hook) return;
  for (size_t i = 0; i < batch_.num_rows(); ++i) {
    Report({.phase = StepPhase::kLogits,
            .request_id = batch_.sampled(i)->spec.request_id,
            .position = batch_.row(i).position,
            .row = batch_.row(i).logits,
            .logits = &memory_.logits()});
  }
}

Result<int64_t> StepLoop::CallPrefixCache(PrefixOp op, const std::vector<int32_t>& tokens,
                                          uint64_t salt) {
  PrefixCache& cache = scheduler_.prefix_cache();
  cache.Advance(SteadyNowUs());
  const int64_t block_size = model_.config.block_size;
  switch (op) {
    case PrefixOp::kFind: {
      const PrefixCache::Match match = cache.FindAll(tokens, salt);
      return (match.num_blocks + cache.CountOnHost(match, tokens, salt)) * block_size;
    }
    case PrefixOp::kPin:
      return cache.Pin(tokens, salt);
    case PrefixOp::kUnpin:
      return cache.Unpin(tokens, salt);
    case PrefixOp::kUnpinAll:
      cache.UnpinAll(salt);
      return 0;
    case PrefixOp::kClear:
      break;
  }
  return cache.Clear() * block_size;
}

void StepLoop::UnloadMemory() {
  scheduler_.PreemptAll();
  scheduler_.prefix_cache().Clear();
  memory_.GiveBack();
  model_.reader->ReleasePages();
  if (model_.draft_reader != nullptr) model_.draft_reader->ReleasePages();
}

Status StepLoop::LoadMemory() {
  try {
    const Status status = Start();
    if (!status.ok()) memory_.GiveBack();
    return status;
  } catch (...) {
    memory_.GiveBack();
    throw;
  }
}

}  // namespace allspark
