// The monotonic clock in the units the engine uses. For durations and timeouts, never for the time
// of day. Any thread may call.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace allspark {

// The longest wait: more would overflow in the clock's own unit. A century.
inline constexpr int64_t kLongestWaitMs = int64_t{100} * 365 * 24 * 3600 * 1000;
// How often a waiting caller is asked whether it gives up.
inline constexpr int64_t kCancelSliceMs = 100;

inline int64_t SteadyNowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
inline int64_t SteadyNowUs() { return SteadyNowNs() / 1000; }

// A time of SteadyNowUs as condition variables take it; at most a century after the clock's begin.
inline std::chrono::steady_clock::time_point SteadyTime(int64_t us) {
  return std::chrono::steady_clock::time_point(
      std::chrono::microseconds(std::min(us, kLongestWaitMs * 1000)));
}
// When a wait of timeout_ms that begins now is over; negative: in a century.
inline int64_t DeadlineUs(int64_t timeout_ms) {
  const int64_t wait_ms = timeout_ms < 0 ? kLongestWaitMs : std::min(timeout_ms, kLongestWaitMs);
  return SteadyNowUs() + wait_ms * 1000;
}
// Until when a caller waits in one go: for its deadline, or until it is asked again.
inline int64_t NextLookUs(int64_t now_us, int64_t deadline_us, bool is_asked) {
  return is_asked ? std::min(now_us + kCancelSliceMs * 1000, deadline_us) : deadline_us;
}

}  // namespace allspark
