#include "platform/numa.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <fstream>
#include <iterator>
#include <numeric>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/log.h"

namespace allspark {

namespace {

// More than any machine has; a damaged list must not take memory without end.
constexpr int kMostNumber = 1 << 20;

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

uintptr_t PageBytes() {
  static const auto bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

uintptr_t BeyondPage(const unsigned char* address) {
  return reinterpret_cast<uintptr_t>(address) % PageBytes();
}

}  // namespace

std::vector<int> ParseNumberList(std::string_view text) {
  std::vector<int> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (true) {
    int first = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc()) return {};
    int last = first;
    if (parsed.ptr != end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, last);
      if (parsed.ec != std::errc()) return {};
    }
    const bool ascends = numbers.empty() || numbers.back() < first;
    if (first < 0 || last < first || last > kMostNumber || !ascends) return {};
    const size_t size = numbers.size();
    numbers.resize(size + static_cast<size_t>(last - first + 1));
    std::iota(numbers.begin() + static_cast<std::ptrdiff_t>(size), numbers.end(), first);
    if (parsed.ptr == end) return numbers;
    if (*parsed.ptr != ',') return {};
    at = parsed.ptr + 1;
  }
}

std::vector<NumaNode> ReadNumaNodes(const std::string& directory, const std::vector<int>& cores) {
  std::vector<NumaNode> nodes;
  size_t found = 0;
  for (const int id : ParseNumberList(FirstLine(directory + "/online"))) {
    const std::vector<int> all =
        ParseNumberList(FirstLine(directory + "/node" + std::to_string(id) + "/cpulist"));
    NumaNode node{id, {}};
    std::set_intersection(all.begin(), all.end(), cores.begin(), cores.end(),
                          std::back_inserter(node.cores));
    found += node.cores.size();
    if (!node.cores.empty()) nodes.push_back(std::move(node));
  }
  if (found != cores.size()) return {{0, cores}};
  return nodes;
}

int BindPages(void* begin, size_t bytes, std::span<const int> nodes) {
  constexpr size_t kBits = sizeof(unsigned long) * CHAR_BIT;  // NOLINT(runtime/int): the kernel's
  const auto most = static_cast<size_t>(*std::max_element(nodes.begin(), nodes.end()));
  std::vector<unsigned long> mask(most / kBits + 1);  // NOLINT(runtime/int)
  for (const int node : nodes) {
    mask[static_cast<size_t>(node) / kBits] |= 1ul << (static_cast<size_t>(node) % kBits);
  }
  // "Preferred" takes another node's memory where this one's is full; "bind" would end the process.
  const int policy = nodes.size() == 1 ? MPOL_PREFERRED : MPOL_INTERLEAVE;
  // The kernel reads one bit less than it is told.
  const long result = syscall(SYS_mbind, begin, bytes, policy, mask.data(),  // NOLINT(runtime/int)
                              mask.size() * kBits + 1, MPOL_MF_MOVE);
  return result == 0 ? 0 : errno;
}

NumaPlacement::NumaPlacement(const std::vector<NumaNode>& nodes, int num_threads,
                             BindPagesFunction bind)
    : bind_(std::move(bind)) {
  int64_t num_cores = 0;
  for (const NumaNode& node : nodes) num_cores += static_cast<int64_t>(node.cores.size());
  AS_CHECK(num_threads >= 1 && num_threads <= num_cores)
      << "num_threads is " << num_threads << " for " << num_cores << " cores";
  int64_t before = 0;
  for (const NumaNode& node : nodes) {
    const int64_t begin = num_threads * before / num_cores;
    before += static_cast<int64_t>(node.cores.size());
    const int64_t end = num_threads * before / num_cores;
    if (begin == end) continue;
    cores_.insert(cores_.end(), node.cores.begin(), node.cores.begin() + (end - begin));
    if (shares_.empty()) caller_cores_ = node.cores;
    shares_.push_back({node.id, begin, end});
  }
}

void NumaPlacement::Bind(void* data, int64_t count, int64_t part_bytes) const {
  auto* const first = static_cast<unsigned char*>(data);
  const int64_t threads = num_threads();
  if (count < static_cast<int64_t>(shares_.size())) {
    std::vector<int> nodes;
    for (const Share& share : shares_) nodes.push_back(share.node);
    return BindRange(first, first + count * part_bytes, nodes);
  }
  for (const Share& share : shares_) {
    // A part that two nodes share is its middle's.
    const int64_t begin = (2 * count * share.begin + threads) / (2 * threads);
    const int64_t end = (2 * count * share.end + threads) / (2 * threads);
    BindRange(first + begin * part_bytes, first + end * part_bytes, {&share.node, 1});
  }
}

// Whole pages only: others hold something else, too.
void NumaPlacement::BindRange(unsigned char* begin, unsigned char* end,
                              std::span<const int> nodes) const {
  if (const uintptr_t beyond = BeyondPage(begin); beyond != 0) begin += PageBytes() - beyond;
  end -= BeyondPage(end);
  if (begin >= end) return;
  const int error = bind_(begin, static_cast<size_t>(end - begin), nodes);
  if (error == 0 || warned_.exchange(true)) return;
  AS_LOG(kWarning) << "memory cannot be bound to NUMA node " << nodes.front() << ": "
                   << std::generic_category().message(error)
                   << "; keys and values lie on the nodes of the threads that write them";
}

}  // namespace allspark
