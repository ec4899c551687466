// How requests join the scheduler of a step loop, and how they end.

#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "engine/error_text.h"
#include "engine/step_loop.h"

namespace allspark {

void StepLoop::AddToScheduler(Request* request) {
  request->joined = true;
  scheduler_.Add(request);
  if (!request->is_sample()) return;
  for (Request* sample : request->group->members().subspan(1)) scheduler_.Add(sample);
}

void StepLoop::RemoveFromScheduler(Request* request) {
  const auto remove = [&](Request* member) {
    // Beams leave with the first beam, and interrupted sequences have left already.
    if (member->state == ScheduledSequence::State::kNone) return;
    scheduler_.Remove(member);
  };
  if (request->group == nullptr) {
    remove(request);
  } else {
    for (Request* member : request->group->members()) remove(member);
  }
  // Before the queue ends: a reader that sees the end sees the blocks free.
  reporter_.OnUsage(scheduler_);
}

void StepLoop::EndRequest(Request* request, FinishReason reason, const std::string& error) {
  if (request->is_sample() && IsOutput(reason) && !EndSample(request, reason)) return;
  if (request->group != nullptr) request = request->group->first();
  if (!mailbox_.End(*request)) return;
  RemoveFromScheduler(request);
  const int64_t now_us = SteadyNowUs();
  reporter_.OnEnd(*request, reason, now_us);
  request->Finish(reason, error, now_us);
  std::shared_ptr<Request> self = std::move(request->self);  // may be the last reference
  if (in_step_) ended_.push_back(std::move(self));
}

bool StepLoop::EndSample(Request* sample, FinishReason reason) {
  scheduler_.Remove(sample);
  mailbox_.EndSample();
  reporter_.OnUsage(scheduler_);
  sample->group->KeepSample(sample, reason);
  sample->ReleaseResources();
  return sample->group->all_ended();
}

void StepLoop::EndAll(FinishReason reason, const std::string& error) {
  while (scheduler_.first_running() != nullptr) {
    EndRequest(Request::Of(scheduler_.first_running()), reason, error);
  }
  while (scheduler_.first_waiting() != nullptr) {
    EndRequest(Request::Of(scheduler_.first_waiting()), reason, error);
  }
}

void StepLoop::EndExpired() {
  const int64_t now_us = SteadyNowUs();
  while (Request* request = mailbox_.Expired(now_us)) {
    EndRequest(request, FinishReason::kDeadline, "");
  }
}

bool StepLoop::EndInterrupted() {
  const std::vector<ScheduledSequence*>& interrupted = scheduler_.interrupted();
  // Several may be of one group, which lives as long as its first member: in_step_ keeps that
  // alive.
  in_step_ = true;
  for (ScheduledSequence* sequence : interrupted) {
    EndRequest(Request::Of(sequence), FinishReason::kInterrupted, "");
  }
  in_step_ = false;
  ended_.clear();
  return !interrupted.empty();
}

void StepLoop::FailStep(const std::vector<PlannedChunk>& plan, const char* message) {
  AS_LOG(kError) << "model '" << model_.config.model_name << "': a step failed: " << message;
  for (const PlannedChunk& chunk : plan) {
    // A request that ended before the exception is gone already (state kNone).
    if (chunk.sequence->state == ScheduledSequence::State::kNone) continue;
    EndRequest(Request::Of(chunk.sequence), FinishReason::kError, ErrorText(message));
  }
}

}  // namespace allspark
