// CPU time and memory that are left to the process by the machine, the control groups (cgroup v1
// and v2) and the limits of the process (ulimit). Reads /proc and the mounted cgroup trees below a
// root folder, "/" except in tests. Nothing is cached: limits change while a process runs. Any
// thread may call.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace allspark {

// Bytes of memory, and what sets their number, for messages: "the limit of address space (ulimit
// -v) is 4294967296 bytes, of which 1073741824 are taken".
struct MemoryBound {
  int64_t bytes = 0;
  std::string source;
};

struct SystemLimits {
  // The CPU quota in CPUs, the lowest of all levels of the process's cgroup; nullopt: no quota.
  std::optional<double> cpu_quota;
  // The lowest of the machine's memory, the limits of all levels of the process's cgroup, and what
  // the process's own limits (RLIMIT_AS, RLIMIT_DATA) leave besides the memory that it has mapped,
  // which does not come back.
  MemoryBound memory_total;
  // MemAvailable, or what is left below the tightest of these limits; file cache that can be
  // dropped counts as free.
  MemoryBound memory_available;
  // The same for memory whose addresses are reserved already: RLIMIT_AS does not count.
  MemoryBound memory_for_reserved;
};

// Whatever cannot be read does not limit.
SystemLimits ReadSystemLimits(const std::string& root = "/");

// Cores to use of `affinity_cores` under a quota: rounded down, so that threads which wait for each
// other are not all stopped in the middle of a step; at least 1.
int CpuCountFrom(int affinity_cores, std::optional<double> cpu_quota);

// Cores this process may run on: the affinity mask, bounded by the cgroup's cpu quota; at least 1.
int CpuCount();

// Of this process, now.
MemoryBound TotalMemory();
MemoryBound AvailableMemory();
MemoryBound MemoryForReserved();

}  // namespace allspark
