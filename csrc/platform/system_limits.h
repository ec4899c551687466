// What the machine and the control groups (cgroup v1 and v2) leave this process: CPU time and
// memory. Reads /proc and the mounted cgroup trees below a root folder, "/" except in tests.
// Nothing is cached: limits change while a process runs. Any thread may call. CpuCount() and its
// siblings in thread_pool.h are the users' view.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace allspark {

struct SystemLimits {
  // CPUs' worth of time per period, the least of every level; nullopt: no quota.
  std::optional<double> cpu_quota;
  // The machine's, or the least limit of every level of the process's cgroup.
  int64_t memory_total_bytes = 0;
  // MemAvailable, or what is left below the tightest level's limit; file cache that can be dropped
  // counts as free.
  int64_t memory_available_bytes = 0;
};

// Whatever cannot be read does not limit.
SystemLimits ReadSystemLimits(const std::string& root = "/");

// Cores to use of `affinity_cores` under a quota: rounded down, so that threads which wait for each
// other are not all stopped in the middle of a step; at least 1.
int CpuCountFrom(int affinity_cores, std::optional<double> cpu_quota);

}  // namespace allspark
