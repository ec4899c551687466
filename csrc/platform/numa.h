// NUMA: memory is nearer to some cores than to others. Which nodes there are, which of their cores
// compute, and putting memory on the node whose threads read it. No bit of a result depends on it.
// Linux. Any thread may call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace allspark {

struct NumaNode {
  int id = 0;
  std::vector<int> cores;  // ascending

  bool operator==(const NumaNode&) const = default;
};

inline constexpr char kNumaDirectory[] = "/sys/devices/system/node";

// The numbers of a list such as "0-3,8", ascending, as the kernel writes them; empty where the text
// is no such list.
std::vector<int> ParseNumberList(std::string_view text);

// The nodes that have some of `cores`, by id, each with those. Where the directory says nothing of
// them, all are of node 0.
std::vector<NumaNode> ReadNumaNodes(const std::string& directory, const std::vector<int>& cores);

// Has the pages of a range come from a node's memory, or from that of several in turn, and moves
// pages that are elsewhere. `begin` is the start of a page. Returns 0, or errno where the system
// refuses.
int BindPages(void* begin, size_t bytes, std::span<const int> nodes);
using BindPagesFunction = std::function<int(void* begin, size_t bytes, std::span<const int> nodes)>;

// A pool's threads on the cores of some nodes, node after node, and memory that they share in the
// same order: of n bytes, rows or heads, thread t of T reads those from n * t / T on.
class NumaPlacement {
 public:
  // Each node gets threads by its share of the cores.
  // Requires: num_threads is at least 1, and at most the number of cores of all nodes.
  NumaPlacement(const std::vector<NumaNode>& nodes, int num_threads,
                BindPagesFunction bind = BindPages);

  int num_threads() const { return static_cast<int>(cores_.size()); }
  // The core of each thread.
  const std::vector<int>& cores() const { return cores_; }
  // All cores of thread 0's node.
  const std::vector<int>& caller_cores() const { return caller_cores_; }

  // Puts `count` parts of part_bytes each on the nodes of the threads that read them; fewer parts
  // than nodes on all nodes in turn. Where the system refuses, pages stay on the nodes of those
  // who touch them first, and a warning says so, once.
  void Bind(void* data, int64_t count, int64_t part_bytes) const;

 private:
  // Threads [begin, end).
  struct Share {
    int node;
    int64_t begin, end;
  };
  void BindRange(unsigned char* begin, unsigned char* end, std::span<const int> nodes) const;

  std::vector<int> cores_;
  std::vector<int> caller_cores_;
  std::vector<Share> shares_;  // of the nodes that have threads
  BindPagesFunction bind_;
  mutable std::atomic<bool> warned_{false};
};

}  // namespace allspark
