#include "engine/end_waiter.h"

#include <algorithm>
#include <string>

#include "base/clock.h"
#include "base/int_math.h"

namespace allspark {
EndWaiter::EndWaiter(int64_t timeout_ms, const std::function<bool()>& cancelled)
    : timeout_ms_(timeout_ms),
      deadline_us_(SteadyNowUs() + std::clamp<int64_t>(timeout_ms, 0, kLongestWaitMs) * 1000),
      cancelled_(cancelled) {}

Status EndWaiter::Await(ResultQueueImpl& queue) const {
  const auto unfinished = [&] {
    return "sync_request: request " + std::to_string(queue.request_id()) + " has not ended";
  };
  while (!queue.WaitTerminal(NextWaitMs())) {
    if (cancelled_ && cancelled_()) {
      return Status::Cancelled(unfinished() + "; the caller gave up");
    }
    if (timeout_ms_ >= 0 && SteadyNowUs() >= deadline_us_) {
      return Status::DeadlineExceeded(unfinished() + " within " + std::to_string(timeout_ms_) +
                                      " ms");
    }
  }
  return Status::Ok();
}

int64_t EndWaiter::NextWaitMs() const {
  const int64_t slice_ms = cancelled_ ? kCancelSliceMs : kLongestWaitMs;
  if (timeout_ms_ < 0) return slice_ms;
  return std::min(CeilDiv(std::max<int64_t>(deadline_us_ - SteadyNowUs(), 0), 1000), slice_ms);
}

}  // namespace allspark
