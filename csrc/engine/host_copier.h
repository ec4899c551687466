// HostCopier: moves KV blocks between a device's memory and the host's, for the second tier of the
// prefix cache. A device whose memory is the host's has none. The step thread calls it.
#pragma once

#include "model/kv_pool.h"

namespace allspark {

class HostCopier {
 public:
  virtual ~HostCopier() = default;
  // Copies in the order of the calls; later computations see the result. Throws on failure. `host`
  // has the same parts as `device`.
  virtual void ToHost(const KvBlock& device, const KvBlock& host) = 0;
  virtual void ToDevice(const KvBlock& host, const KvBlock& device) = 0;
};

}  // namespace allspark
