// A fake device with memory of its own, for the host tier of the prefix cache.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "engine/host_copier.h"

namespace allspark::testing {

struct FakeDevice final : HostCopier {
  void ToHost(const KvBlock& device, const KvBlock& host) override {
    CopyKvBlock(device, host);
    ++num_out;
  }
  void ToDevice(const KvBlock& host, const KvBlock& device) override {
    if (fails) throw std::runtime_error("the link is down");
    CopyKvBlock(host, device);
    ++num_in;
  }
  int64_t num_out = 0, num_in = 0;  // read only between requests
  bool fails = false;
};

// Sets CPU_CACHE_RATIO during its lifetime. An engine reads the variable at its first install.
class CacheRatio {
 public:
  explicit CacheRatio(const char* ratio) { setenv("CPU_CACHE_RATIO", ratio, 1); }
  ~CacheRatio() { unsetenv("CPU_CACHE_RATIO"); }
  CacheRatio(const CacheRatio&) = delete;
  CacheRatio& operator=(const CacheRatio&) = delete;
};

}  // namespace allspark::testing
