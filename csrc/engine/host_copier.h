// HostCopier: moves KV blocks between a device's memory and the host's, for the second tier of the
// prefix cache. A device whose memory is the host's has none. The step thread calls it.
#pragma once

#include <cstddef>

namespace allspark {

class HostCopier {
 public:
  virtual ~HostCopier() = default;
  // Copies in the order of the calls; what is computed afterwards sees them. Throws on failure.
  virtual void ToHost(const void* device, void* host, size_t bytes) = 0;
  virtual void ToDevice(const void* host, void* device, size_t bytes) = 0;
};

}  // namespace allspark
