#include "engine/compute_unit.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"
#include "platform/affinity.h"
#include "platform/system_limits.h"

namespace allspark {

namespace {

constexpr std::string_view kNuma = "CPU_NUMA";

// The ids of a valid unit, such as "CPU_NUMA:0,1"; empty where it has none.
std::vector<int> IdsOf(std::string_view unit) {
  std::vector<int> ids;
  for (size_t at = unit.find(':'); at != std::string_view::npos; at = unit.find(',', at + 1)) {
    int id = 0;
    std::from_chars(unit.data() + at + 1, unit.data() + unit.size(), id);
    ids.push_back(id);
  }
  return ids;
}

std::string NamesOf(const std::vector<NumaNode>& nodes) {
  std::string names;
  for (const NumaNode& node : nodes) {
    names += (names.empty() ? "" : ", ") + std::to_string(node.id);
  }
  return names;
}

}  // namespace

void ResolveComputeUnit(RuntimeConfig& config) {
  if (!config.compute_unit.starts_with("CUDA")) return;
  AS_LOG(kWarning) << "compute_unit is '" << config.compute_unit
                   << "', but this build has no CUDA device; model '" << config.model_name
                   << "' runs on CPU:0";
  config.compute_unit = "CPU:0";
}

Result<std::shared_ptr<const NumaPlacement>> PlacementFor(const RuntimeConfig& config,
                                                          const std::string& numa_directory) {
  const std::string& unit = config.compute_unit;
  if (!unit.starts_with(kNuma)) return std::shared_ptr<const NumaPlacement>();
  std::vector<NumaNode> nodes = ReadNumaNodes(numa_directory, AffinityCores());
  const bool is_numa = nodes.size() > 1;
  if (const std::vector<int> ids = IdsOf(unit); !ids.empty()) {
    const std::string names = NamesOf(nodes);
    std::erase_if(nodes, [&](const NumaNode& node) {
      return std::find(ids.begin(), ids.end(), node.id) == ids.end();
    });
    if (nodes.size() != ids.size()) {
      return Status::InvalidArgument("compute_unit is '" + unit +
                                     "'; its ids must be of NUMA nodes of which this process has "
                                     "cores: " +
                                     names);
    }
  }
  if (!is_numa) return std::shared_ptr<const NumaPlacement>();
  size_t num_cores = 0;
  for (const NumaNode& node : nodes) num_cores += node.cores.size();
  if (config.num_threads > static_cast<int64_t>(num_cores)) {
    return Status::InvalidArgument("num_threads is " + std::to_string(config.num_threads) +
                                   "; with " + unit + " it must be at most " +
                                   std::to_string(num_cores) + ", the cores of its nodes");
  }
  const int num_threads = config.num_threads > 0
                              ? static_cast<int>(config.num_threads)
                              : std::min(static_cast<int>(num_cores), CpuCount());
  return std::make_shared<const NumaPlacement>(nodes, num_threads);
}

}  // namespace allspark
