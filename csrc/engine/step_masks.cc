// The part of ModelInstance's step that waits: for token masks, and what ends that wait: a stop, a
// deadline.

#include <algorithm>
#include <string>

#include "base/clock.h"
#include "engine/error_text.h"
#include "engine/model_instance.h"

namespace allspark {

void ModelInstance::AwaitMasks() {
  Running& running = *running_;
  const int64_t deadline_us = SteadyNowUs() + config_.token_mask_timeout_ms * 1000;
  for (size_t i = 0; i < running.rows.size(); ++i) {
    Request* request = running.sampled[i];
    if (request->mask != nullptr) AwaitMask(request, deadline_us, running.rows[i]);
  }
  // Those whose mask did not come have ended, and perhaps others whose deadline came instead.
  size_t num_kept = 0;
  for (size_t i = 0; i < running.rows.size(); ++i) {
    if (running.sampled[i]->state == ScheduledSequence::State::kNone) continue;
    running.rows[num_kept] = running.rows[i];
    running.sampled[num_kept++] = running.sampled[i];
  }
  running.rows.resize(num_kept);
  running.sampled.resize(num_kept);
}

void ModelInstance::AwaitMask(Request* request, int64_t deadline_us, SamplingRow& row) {
  // Nobody signals a stop to this wait; it looks for one this often.
  constexpr int64_t kSliceUs = 10000;
  while (true) {
    const int64_t now_us = SteadyNowUs();
    switch (request->mask->Wait(std::min(now_us + kSliceUs, deadline_us))) {
      case MaskAnswer::kMask:
        row.mask = request->mask->words();
        return;
      case MaskAnswer::kFinished:
        EndRequest(request, FinishReason::kStop, "");
        return;
      case MaskAnswer::kFailed:
        EndRequest(request, FinishReason::kError,
                   ErrorText("token mask: ", request->mask->error()));
        return;
      case MaskAnswer::kNone:
        break;
    }
    if (IsStopping(*request)) {
      EndRequest(request, FinishReason::kCancelled, "");
      return;
    }
    EndExpired();
    if (request->state == ScheduledSequence::State::kNone) return;
    if (now_us >= deadline_us) {
      EndRequest(request, FinishReason::kError,
                 "the token mask of position " + std::to_string(row.position) +
                     " did not come within token_mask_timeout_ms, which is " +
                     std::to_string(config_.token_mask_timeout_ms));
      return;
    }
  }
}

bool ModelInstance::IsStopping(const Request& request) const {
  std::lock_guard lock(mutex_);
  return request.stop_self != nullptr || (stopping_ && stop_mode_ == StopMode::kCancel);
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
    // What is in the mailbox is linked there.
    if (request->joined) return request;
  }
  return nullptr;
}

}  // namespace allspark
