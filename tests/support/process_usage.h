// What this process has of the system, as the kernel tells it.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace allspark::testing {

struct MemoryUsage {
  int64_t mapped_bytes = 0;    // address space
  int64_t resident_bytes = 0;  // of it in memory
  int64_t file_bytes = 0;      // of that pages of files, and of shared memory
};

inline MemoryUsage ReadMemoryUsage() {
  int64_t mapped = 0, resident = 0, file = 0;
  std::ifstream("/proc/self/statm") >> mapped >> resident >> file;
  const int64_t page = sysconf(_SC_PAGESIZE);
  return {mapped * page, resident * page, file * page};
}

inline int64_t NumEntries(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}
inline int64_t NumThreads() { return NumEntries("/proc/self/task"); }
inline int64_t NumDescriptors() { return NumEntries("/proc/self/fd"); }

}  // namespace allspark::testing
