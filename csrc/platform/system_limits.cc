#include "platform/system_limits.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string_view>
#include <vector>

#include "platform/affinity.h"

namespace allspark {

namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  return std::move(text).str();
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  std::string part;
  while (std::getline(stream, part, separator)) parts.push_back(part);
  return parts;
}

// The number a text begins with, blanks skipped; nullopt when there is none ("max").
std::optional<int64_t> LeadingNumber(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return std::nullopt;
  int64_t value = 0;
  const auto result = std::from_chars(text.data() + begin, text.data() + text.size(), value);
  if (result.ec == std::errc::result_out_of_range) return kNoLimit;
  if (result.ec != std::errc()) return std::nullopt;
  return value;
}

std::optional<int64_t> NumberInFile(const std::string& path) {
  return LeadingNumber(ReadFile(path));
}

// The number after `key` at the begin of a line, as in /proc/meminfo ("MemTotal:  1 kB") and
// memory.stat.
std::optional<int64_t> NumberAfterKey(const std::string& text, std::string_view key) {
  for (const std::string& line : Split(text, '\n')) {
    if (line.starts_with(key) && line.size() > key.size() &&
        (line[key.size()] == ' ' || line[key.size()] == '\t')) {
      return LeadingNumber(std::string_view(line).substr(key.size()));
    }
  }
  return std::nullopt;
}

// mountinfo writes blanks and backslashes as \ooo.
std::string UnescapeOctal(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    int code = 0;
    if (text[i] == '\\' && i + 3 < text.size() &&
        std::from_chars(&text[i + 1], &text[i + 1] + 3, code, 8).ptr == &text[i + 1] + 3) {
      out += static_cast<char>(code);
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

bool HasItem(const std::string& comma_list, std::string_view item) {
  const std::vector<std::string> items = Split(comma_list, ',');
  return std::find(items.begin(), items.end(), item) != items.end();
}

// One mounted cgroup tree.
struct CgroupMount {
  bool v2;
  std::string root;  // the cgroup that the mount shows at its top
  std::string mount_point;
  std::string controllers;  // v1: comma list
};

std::vector<CgroupMount> ReadCgroupMounts(const std::string& mountinfo) {
  std::vector<CgroupMount> mounts;
  for (const std::string& line : Split(mountinfo, '\n')) {
    // "31 23 0:28 ROOT MOUNT_POINT options [optional fields] - TYPE source SUPER_OPTIONS"
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const std::vector<std::string> head = Split(line.substr(0, dash), ' ');
    const std::vector<std::string> tail = Split(line.substr(dash + 3), ' ');
    if (head.size() < 5 || tail.size() < 3) continue;
    if (tail[0] != "cgroup" && tail[0] != "cgroup2") continue;
    mounts.push_back(
        {tail[0] == "cgroup2", UnescapeOctal(head[3]), UnescapeOctal(head[4]), tail[2]});
  }
  return mounts;
}

// The process's path in the hierarchy of a mount, from /proc/self/cgroup ("ID:CONTROLLERS:PATH").
std::optional<std::string> ProcessCgroup(const std::string& self_cgroup, const CgroupMount& mount,
                                         std::string_view controller) {
  for (const std::string& line : Split(self_cgroup, '\n')) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (mount.v2 ? controllers.empty() : HasItem(controllers, controller)) {
      return line.substr(second + 1);
    }
  }
  return std::nullopt;
}

// Folders of the process's cgroup and of each of its ancestors that the mount shows, leaf first.
std::vector<std::string> CgroupFolders(const std::string& root, const CgroupMount& mount,
                                       std::string path) {
  // A container often sees its own cgroup as the mount's top while the path counts from the host's.
  if (mount.root != "/") {
    const bool below = path.starts_with(mount.root) &&
                       (path.size() == mount.root.size() || path[mount.root.size()] == '/');
    path = below ? path.substr(mount.root.size()) : "";
  }
  if (path.find("..") != std::string::npos) path.clear();  // Outside of the cgroup namespace.
  std::vector<std::string> folders;
  const std::string top = root + mount.mount_point.substr(1);
  while (!path.empty() && path != "/") {
    folders.push_back(top + path);
    path.resize(path.rfind('/'));
  }
  folders.push_back(top);
  return folders;
}

void Lower(MemoryBound& bound, int64_t bytes, const std::string& source) {
  if (bytes < bound.bytes) bound = {bytes, source};
}

void ApplyMemory(const std::string& folder, bool v2, int64_t machine_bytes, SystemLimits& limits) {
  // Above memory.high the kernel slows the process down so much that this memory is of no use.
  const std::vector<std::string> names =
      v2 ? std::vector<std::string>{"/memory.max", "/memory.high"}
         : std::vector<std::string>{"/memory.limit_in_bytes"};
  MemoryBound limit{kNoLimit, ""};
  for (const std::string& name : names) {
    Lower(limit, NumberInFile(folder + name).value_or(kNoLimit), folder + name);
  }
  if (limit.bytes >= machine_bytes) return;  // v1 writes "no limit" as a huge number.
  const std::string source = limit.source + " is " + std::to_string(limit.bytes) + " bytes";
  Lower(limits.memory_total, limit.bytes, source);
  const int64_t usage =
      NumberInFile(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes")).value_or(0);
  const int64_t droppable = NumberAfterKey(ReadFile(folder + "/memory.stat"),
                                           v2 ? "inactive_file" : "total_inactive_file")
                                .value_or(0);
  const int64_t taken = std::max<int64_t>(0, usage - droppable);
  const int64_t left = std::max<int64_t>(0, limit.bytes - taken);
  const std::string beside = source + ", of which " + std::to_string(taken) + " are taken";
  Lower(limits.memory_available, left, beside);
  Lower(limits.memory_for_reserved, left, beside);
}

// The process's own limits, which its threads share.
void ApplyProcessLimits(const std::string& root, SystemLimits& limits) {
  const std::string own = ReadFile(root + "proc/self/limits");
  const std::string status = ReadFile(root + "proc/self/status");
  const auto apply = [&](const char* limit_key, const char* taken_key, const std::string& name,
                         std::initializer_list<MemoryBound*> bounds) {
    const std::optional<int64_t> limit = NumberAfterKey(own, limit_key);
    if (!limit.has_value()) return;  // "unlimited"
    const int64_t taken = NumberAfterKey(status, taken_key).value_or(0) * 1024;
    for (MemoryBound* bound : bounds) {
      Lower(*bound, std::max<int64_t>(0, *limit - taken),
            name + " is " + std::to_string(*limit) + " bytes, of which " + std::to_string(taken) +
                " are taken");
    }
  };
  apply("Max address space", "VmSize:", "the limit of address space (ulimit -v)",
        {&limits.memory_total, &limits.memory_available});
  apply("Max data size", "VmData:", "the limit of data (ulimit -d)",
        {&limits.memory_total, &limits.memory_available, &limits.memory_for_reserved});
}

void ApplyCpu(const std::string& folder, bool v2, SystemLimits& limits) {
  int64_t quota = 0, period = 0;
  if (v2) {
    const std::vector<std::string> words = Split(ReadFile(folder + "/cpu.max"), ' ');
    if (words.size() < 2) return;
    quota = LeadingNumber(words[0]).value_or(0);
    period = LeadingNumber(words[1]).value_or(0);
  } else {
    quota = NumberInFile(folder + "/cpu.cfs_quota_us").value_or(0);  // -1: none.
    period = NumberInFile(folder + "/cpu.cfs_period_us").value_or(0);
  }
  if (quota <= 0 || period <= 0) return;
  const double cpus = static_cast<double>(quota) / static_cast<double>(period);
  limits.cpu_quota = std::min(cpus, limits.cpu_quota.value_or(cpus));
}

}  // namespace

SystemLimits ReadSystemLimits(const std::string& root_folder) {
  const std::string root = root_folder.ends_with('/') ? root_folder : root_folder + "/";
  SystemLimits limits;
  const std::string meminfo = ReadFile(root + "proc/meminfo");
  int64_t machine_bytes = NumberAfterKey(meminfo, "MemTotal:").value_or(0) * 1024;
  int64_t free_bytes = NumberAfterKey(meminfo, "MemAvailable:").value_or(0) * 1024;
  if (machine_bytes <= 0) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    machine_bytes = sysconf(_SC_PHYS_PAGES) * page;
    free_bytes = sysconf(_SC_AVPHYS_PAGES) * page;
  }
  limits.memory_total = {machine_bytes,
                         "the machine has " + std::to_string(machine_bytes) + " bytes of memory"};
  limits.memory_available = {
      free_bytes, "the machine has " + std::to_string(free_bytes) + " bytes of memory available"};
  limits.memory_for_reserved = limits.memory_available;
  ApplyProcessLimits(root, limits);
  const std::string self_cgroup = ReadFile(root + "proc/self/cgroup");
  for (const CgroupMount& mount : ReadCgroupMounts(ReadFile(root + "proc/self/mountinfo"))) {
    for (const bool memory : {true, false}) {
      const char* controller = memory ? "memory" : "cpu";
      if (!mount.v2 && !HasItem(mount.controllers, controller)) continue;
      const auto path = ProcessCgroup(self_cgroup, mount, controller);
      if (!path.has_value()) continue;
      for (const std::string& folder : CgroupFolders(root, mount, *path)) {
        if (memory) {
          ApplyMemory(folder, mount.v2, machine_bytes, limits);
        } else {
          ApplyCpu(folder, mount.v2, limits);
        }
      }
    }
  }
  return limits;
}

int CpuCountFrom(int affinity_cores, std::optional<double> cpu_quota) {
  int count = affinity_cores;
  if (cpu_quota.has_value() && *cpu_quota < count) count = static_cast<int>(*cpu_quota);
  return std::max(count, 1);
}

int CpuCount() {
  return CpuCountFrom(static_cast<int>(AffinityCores().size()), ReadSystemLimits().cpu_quota);
}
MemoryBound TotalMemory() { return ReadSystemLimits().memory_total; }
MemoryBound AvailableMemory() { return ReadSystemLimits().memory_available; }
MemoryBound MemoryForReserved() { return ReadSystemLimits().memory_for_reserved; }

}  // namespace allspark
