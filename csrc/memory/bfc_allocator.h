// Best-fit-with-coalescing allocator over one reserved region (the scheme of TensorFlow's allocator
// of that name, after Doug Lea's dlmalloc): free chunks ordered by size, split on allocation,
// merged with free neighbours on release. On the CPU the region is reserved address space,
// committed when touched; whole free pages are handed back to the system.
#pragma once

#include <memory>
#include <string>

#include "memory/allocator.h"

namespace allspark {

struct BfcOptions {
  bool enabled = true;        // BFC_ALLOCATOR: OFF uses the system's heap, within the same bound
  double mem_ratio = 0.9;     // BFC_MEM_RATIO: (total - leftover) * ratio is reserved
  int64_t leftover_mb = 350;  // BFC_LEFTOVER_MB
  // CPU_CACHE_RATIO: the share of the host's available memory that the prefix cache's second tier
  // takes, where the device has memory of its own.
  double cpu_cache_ratio = 0;
  bool allow_growth = true;  // BFC_ALLOW_GROWTH: OFF commits the whole region at creation

  // Reads the environment; a malformed value is an InvalidArgument naming variable, value and form.
  // Booleans: ON/OFF, 1/0, true/false, any case.
  static Result<BfcOptions> FromEnv();
};

// The CPU device's allocator. total_bytes: what mem_ratio and leftover_mb apply to; total_source
// says in messages what set it.
Result<std::unique_ptr<Allocator>> CreateCpuBfcAllocator(const BfcOptions& options,
                                                         int64_t total_bytes,
                                                         const std::string& total_source = "");

}  // namespace allspark
