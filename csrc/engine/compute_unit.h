// What the compute unit of a runtime config stands for: the device, and on the CPU the NUMA nodes
// whose cores compute.
#pragma once

#include <memory>
#include <string>

#include "allspark/config.h"
#include "platform/numa.h"
#include "platform/thread_pool.h"

namespace allspark {

// The threads of a model, and how they lie on NUMA nodes; null: anywhere.
struct Compute {
  std::shared_ptr<ThreadPool> pool;
  std::shared_ptr<const NumaPlacement> numa;
};

// "CPU:0" stays as it is. CUDA falls back to the CPU with a warning, since there is no such device.
void ResolveComputeUnit(RuntimeConfig& config);

// Null unless the unit is CPU_NUMA, which without ids is all nodes, and the process has cores of
// several nodes. numa_directory: ReadNumaNodes. InvalidArgument where it has no core of a node that
// is named, or fewer cores than num_threads.
Result<std::shared_ptr<const NumaPlacement>> PlacementFor(const RuntimeConfig& config,
                                                          const std::string& numa_directory);

}  // namespace allspark
