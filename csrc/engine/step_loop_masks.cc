// How a step waits for token masks.

#include <algorithm>
#include <string>

#include "base/clock.h"
#include "engine/error_text.h"
#include "engine/step_loop.h"

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
void StepLoop::AwaitMasks(int64_t computed_us) {
  int64_t until_us = SteadyNowUs() + std::max(computed_us / 10, kLeastWaitUs);
  while (const int64_t num_late = ReadMasks(until_us)) {
    if (scheduler_.num_running() > num_late || scheduler_.num_waiting() > 0) break;
    if (mailbox_.HasMail()) break;
    EndExpired();
    until_us = SteadyNowUs() + kSliceUs;
  }
  size_t num_kept = 0;
  for (size_t i = 0; i < batch_.num_rows(); ++i) {
    Request* const request = batch_.sampled(i);
    if (request->state == ScheduledSequence::State::kNone) continue;  // ended
    if (request->mask != nullptr && batch_.row(i).mask == nullptr) {
      scheduler_.Hold(request);
      ++num_held_;
      continue;
    }
    batch_.Put(num_kept++, batch_.row(i), request);
  }
  batch_.Truncate(num_kept);
}

int64_t StepLoop::ReadMasks(int64_t until_us) {
  int64_t num_late = 0;
  for (size_t i = 0; i < batch_.num_rows(); ++i) {
    Request* const request = batch_.sampled(i);
    const bool awaits = request->mask != nullptr && batch_.row(i).mask == nullptr;
    if (!awaits || request->state == ScheduledSequence::State::kNone) continue;
    const MaskRead read = ReadMask(request, until_us);
    if (read == MaskRead::kLate) ++num_late;
    if (read == MaskRead::kThere) batch_.row(i).mask = request->mask->words();
  }
  return num_late;
}

StepLoop::MaskRead StepLoop::ReadMask(Request* request, int64_t until_us) {
  if (request->mask_deadline_us == 0) {
    request->mask_deadline_us = SteadyNowUs() + model_.config.token_mask_timeout_ms * 1000;
  }
  switch (request->mask->Wait(std::min(until_us, request->mask_deadline_us))) {
    case MaskAnswer::kMask:
      request->mask_deadline_us = 0;
      return MaskRead::kThere;
    case MaskAnswer::kFinished:
      EndRequest(request, FinishReason::kStop, "");
      return MaskRead::kRequestEnded;
    case MaskAnswer::kFailed:
      EndRequest(request, FinishReason::kError,
                 ErrorText([&] { return "token mask: " + request->mask->error(); }));
      return MaskRead::kRequestEnded;
    case MaskAnswer::kNone:
      break;
  }
  if (SteadyNowUs() < request->mask_deadline_us) return MaskRead::kLate;
  EndRequest(request, FinishReason::kError, ErrorText([&] {
               return "the token mask of position " + std::to_string(request->num_tokens) +
                      " did not come within token_mask_timeout_ms, which is " +
                      std::to_string(model_.config.token_mask_timeout_ms);
             }));
  return MaskRead::kRequestEnded;
}

void StepLoop::ReleaseHeld(int64_t until_us) {
  if (num_held_ == 0) return;
  num_held_ = 0;
  for (ScheduledSequence* s = scheduler_.first_running(); s != nullptr;) {
    Request* const request = Request::Of(s);
    s = s->next;  // read first: the request may end here
    if (!request->held) continue;
    const MaskRead read = ReadMask(request, until_us);
    if (read == MaskRead::kLate) ++num_held_;
    if (read == MaskRead::kThere) request->held = false;
  }
}

}  // namespace allspark
