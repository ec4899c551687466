// The part of ModelInstance's step that waits for token masks, and ends requests whose time is
// over.

#include <algorithm>
#include <string>

#include "base/clock.h"
#include "engine/error_text.h"
#include "engine/model_instance.h"

namespace allspark {
namespace {

// A step waits for masks for a tenth of its compute time, and at least this long. Nearly all masks
// come while the step computes, and computing a row again costs less than a longer wait of all
// requests.
constexpr int64_t kLeastWaitUs = 1000;
// New mail does not wake a wait for masks, so that wait looks for mail this often.
constexpr int64_t kSliceUs = 10000;

}  // namespace

// A late mask delays its own request, not the step: the request is held, and its newest token is
// computed again once the mask is there. If the model has no other work, the step waits for the
// mask here instead, which saves computing the token again.
void ModelInstance::AwaitMasks() {
  Running& running = *running_;
  Scheduler& scheduler = *running.scheduler;
  const int64_t computed_us = running.step.computed_us - running.step.planned_us;
  int64_t until_us = SteadyNowUs() + std::max(computed_us / 10, kLeastWaitUs);
  while (const int64_t num_late = ReadMasks(until_us)) {
    if (scheduler.num_running() > num_late || scheduler.num_waiting() > 0 || HasMail()) break;
    EndExpired();
    until_us = SteadyNowUs() + kSliceUs;
  }
  size_t num_kept = 0;
  for (size_t i = 0; i < running.rows.size(); ++i) {
    Request* request = running.sampled[i];
    if (request->state == ScheduledSequence::State::kNone) continue;  // ended
    if (request->mask != nullptr && running.rows[i].mask == nullptr) {
      scheduler.Hold(request);
      ++running.num_held;
      continue;
    }
    running.rows[num_kept] = running.rows[i];
    running.sampled[num_kept++] = request;
  }
  running.rows.resize(num_kept);
  running.sampled.resize(num_kept);
}

int64_t ModelInstance::ReadMasks(int64_t until_us) {
  Running& running = *running_;
  int64_t num_late = 0;
  for (size_t i = 0; i < running.rows.size(); ++i) {
    Request* request = running.sampled[i];
    const bool awaits = request->mask != nullptr && running.rows[i].mask == nullptr;
    if (!awaits || request->state == ScheduledSequence::State::kNone) continue;
    const MaskRead read = ReadMask(request, until_us);
    if (read == MaskRead::kLate) ++num_late;
    if (read == MaskRead::kThere) running.rows[i].mask = request->mask->words();
  }
  return num_late;
}

ModelInstance::MaskRead ModelInstance::ReadMask(Request* request, int64_t until_us) {
  if (request->mask_deadline_us == 0) {
    request->mask_deadline_us = SteadyNowUs() + config_.token_mask_timeout_ms * 1000;
  }
  switch (request->mask->Wait(std::min(until_us, request->mask_deadline_us))) {
    case MaskAnswer::kMask:
      request->mask_deadline_us = 0;
      return MaskRead::kThere;
    case MaskAnswer::kFinished:
      EndRequest(request, FinishReason::kStop, "");
      return MaskRead::kRequestEnded;
    case MaskAnswer::kFailed:
      EndRequest(request, FinishReason::kError, ErrorText("token mask: ", request->mask->error()));
      return MaskRead::kRequestEnded;
    case MaskAnswer::kNone:
      break;
  }
  if (SteadyNowUs() < request->mask_deadline_us) return MaskRead::kLate;
  EndRequest(request, FinishReason::kError,
             "the token mask of position " + std::to_string(request->num_tokens) +
                 " did not come within token_mask_timeout_ms, which is " +
                 std::to_string(config_.token_mask_timeout_ms));
  return MaskRead::kRequestEnded;
}

void ModelInstance::ReleaseHeld(int64_t until_us) {
  Running& running = *running_;
  if (running.num_held == 0) return;
  running.num_held = 0;
  for (ScheduledSequence* s = running.scheduler->first_running(); s != nullptr;) {
    auto* request = static_cast<Request*>(s);
    s = s->next;  // read first: the request may end here
    if (!request->held) continue;
    const MaskRead read = ReadMask(request, until_us);
    if (read == MaskRead::kLate) ++running.num_held;
    if (read == MaskRead::kThere) request->held = false;
  }
}

bool ModelInstance::HasMail() const {
  std::lock_guard lock(mutex_);
  return new_head_ != nullptr || stop_head_ != nullptr || step_calls_ != nullptr || stopping_;
}

void ModelInstance::EndExpired() {
  const int64_t now_us = SteadyNowUs();
  while (Request* request = TakeExpired(now_us)) {
    EndRequest(request, FinishReason::kDeadline, "");
  }
}

Request* ModelInstance::TakeExpired(int64_t now_us) const {
  std::lock_guard lock(mutex_);
  for (const auto& [deadline_us, request] : deadlines_) {
    if (deadline_us > now_us) break;
    // A request that is still in the mailbox is linked there, and must stay.
    if (request->joined) return request;
  }
  return nullptr;
}

}  // namespace allspark
