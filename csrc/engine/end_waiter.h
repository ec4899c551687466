// Waits for requests to end, all within one timeout. Any thread may wait.
#pragma once

#include <cstdint>
#include <functional>

#include "allspark/status.h"
#include "engine/result_queue_impl.h"

namespace allspark {

class EndWaiter {
 public:
  // timeout_ms < 0: no limit. `cancelled` is called from time to time, ends the wait when it
  // returns true, and may be empty; it outlives the object.
  EndWaiter(int64_t timeout_ms, const std::function<bool()>& cancelled);

  Status Await(ResultQueueImpl& queue) const;

 private:
  int64_t NextWaitMs() const;

  const int64_t timeout_ms_, deadline_us_;
  const std::function<bool()>& cancelled_;
};

}  // namespace allspark
