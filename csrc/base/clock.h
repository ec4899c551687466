// The monotonic clock in the units the engine uses. For durations and timeouts, never for the time
// of day. Any thread may call.
#pragma once

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
inline int64_t SteadyNowMs() { return SteadyNowNs() / 1000000; }

}  // namespace allspark
