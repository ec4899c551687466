// Waits for a thread that waits: for tests in which a call must have begun to wait before something
// else happens.
#pragma once

#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <string>
#include <thread>

namespace allspark::testing {

inline pid_t ThisThread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

// The kernel's count of the sleeps of a thread of this process; empty if it does not sleep.
inline std::string SleepOf(pid_t thread) {
  std::ifstream status("/proc/self/task/" + std::to_string(thread) + "/status");
  bool sleeps = false;
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("State:\tS")) sleeps = true;
    if (line.starts_with("voluntary_ctxt_switches:") && sleeps) return line;
  }
  return "";
}

// Returns once a thread has slept for two milliseconds without a break. One that could run and has
// no core does not sleep.
inline void AwaitBlocked(pid_t thread) {
  std::string before, now;
  do {
    before = SleepOf(thread);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    now = SleepOf(thread);
  } while (now.empty() || now != before);
}

}  // namespace allspark::testing
