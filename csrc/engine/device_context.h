// What a model needs of the device that it computes on.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/host_copier.h"
#include "kernels/kernel_table.h"
#include "memory/allocator.h"
#include "platform/thread_pool.h"

namespace allspark {

struct DeviceContext {
  std::shared_ptr<Allocator> allocator;
  std::shared_ptr<ThreadPool> pool;
  const kernels::KernelTable* kernels = nullptr;
  // Of a device with memory of its own: how blocks get to the host, and room for them there.
  std::shared_ptr<HostCopier> host_copier;
  int64_t host_cache_bytes = 0;
};

}  // namespace allspark
