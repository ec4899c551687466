#include "platform/affinity.h"

#include <errno.h>
#include <sched.h>

#include <algorithm>
#include <memory>

namespace allspark {

namespace {

// A CPU set of any size; the fixed cpu_set_t ends at core 1023.
struct CpuSetDeleter {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using CpuSet = std::unique_ptr<cpu_set_t, CpuSetDeleter>;

constexpr int kMaxCores = 1 << 16;

}  // namespace

std::vector<int> AffinityCores() {
  for (int limit = 1024; limit <= kMaxCores; limit *= 2) {
    const CpuSet set(CPU_ALLOC(limit));
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(limit);
    CPU_ZERO_S(bytes, set.get());
    if (sched_getaffinity(0, bytes, set.get()) != 0) {
      if (errno == EINVAL) continue;  // The kernel's mask is larger than ours.
      break;
    }
    std::vector<int> cores;
    for (int core = 0; core < limit; ++core) {
      if (CPU_ISSET_S(core, bytes, set.get())) cores.push_back(core);
    }
    if (!cores.empty()) return cores;
    break;
  }
  return {0};
}

bool PinThread(pthread_t thread, const std::vector<int>& cores) {
  const int limit = *std::max_element(cores.begin(), cores.end()) + 1;
  const CpuSet set(CPU_ALLOC(limit));
  if (set == nullptr) return false;
  const size_t bytes = CPU_ALLOC_SIZE(limit);
  CPU_ZERO_S(bytes, set.get());
  for (const int core : cores) CPU_SET_S(core, bytes, set.get());
  return pthread_setaffinity_np(thread, bytes, set.get()) == 0;
}

}  // namespace allspark
