// A device that pretends to have memory of its own, for the second tier of the prefix cache.
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
  int64_t num_out = 0, num_in = 0;  // read between requests alone
  bool fails = false;
};

// CPU_CACHE_RATIO while it lives: an engine reads it with its first install.
class CacheRatio {
 public:
  explicit CacheRatio(const char* ratio) { setenv("CPU_CACHE_RATIO", ratio, 1); }
  ~CacheRatio() { unsetenv("CPU_CACHE_RATIO"); }
  CacheRatio(const CacheRatio&) = delete;
  CacheRatio& operator=(const CacheRatio&) = delete;
};

}  // namespace allspark::testing
