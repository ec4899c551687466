#include "engine/end_waiter.h"

#include <algorithm>
#include <string>

#include "base/clock.h"
#include "base/int_math.h"

namespace allspark {

EndWaiter::EndWaiter(int64_t timeout_ms, const std::function<bool()>& cancelled)
    : timeout_ms_(timeout_ms), deadline_us_(DeadlineUs(timeout_ms)), cancelled_(cancelled) {}

Status EndWaiter::Await(ResultQueueImpl& queue) const {
  const auto unfinished = [&] {
    return "sync_request: request " + std::to_string(queue.request_id()) + " has not ended";
  };
  while (!queue.WaitTerminal(NextWaitMs())) {
    if (cancelled_ && cancelled_()) {
      return Status::Cancelled(unfinished() + "; the caller gave up");
    }
    if (SteadyNowUs() >= deadline_us_) {
      return Status::DeadlineExceeded(unfinished() + " within " + std::to_string(timeout_ms_) +
                                      " ms");
    }
  }
  return Status::Ok();
}

int64_t EndWaiter::NextWaitMs() const {
  const int64_t left_ms = CeilDiv(std::max<int64_t>(deadline_us_ - SteadyNowUs(), 0), 1000);
  return cancelled_ ? std::min(left_ms, kCancelSliceMs) : left_ms;
}

}  // namespace allspark
