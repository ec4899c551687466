// A fake device with memory of its own, for the host tier of the prefix cache.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>

#include "engine/testing.h"
#include "ops/cpu/cpu_device.h"
#include "platform/thread_pool.h"
#include "support/environment.h"
#include "support/sim_device.h"

namespace allspark::testing {

// How blocks get from the device to the host and back: what a test counts, and lets fail.
struct HostLink {
  virtual ~HostLink() = default;
  virtual void ToHost() {
    ++num_out;
    ++num_unfinished;
  }
  virtual void FromHost() {
    if (fails) throw std::runtime_error("the link is down");
    ++num_in;
  }
  int64_t num_out = 0, num_in = 0;  // blocks; read only between requests
  int64_t num_unfinished = 0;       // blocks to the host since the last Finish
  bool fails = false;
};

template <typename Base>
class LinkedDevice final : public Base {
 public:
  LinkedDevice(CpuDevice::Parts parts, std::shared_ptr<HostLink> link)
      : Base(parts), parts_(std::move(parts)), link_(std::move(link)) {}

  bool has_own_memory() const override { return true; }
  int64_t host_cache_bytes() const override { return parts_.host_cache_bytes(); }
  void BlockToHost(const KvPool& pool, int32_t block, void* host) override {
    link_->ToHost();
    Base::BlockToHost(pool, block, host);
  }
  void BlockFromHost(const void* host, const KvPool& pool, int32_t block) override {
    link_->FromHost();
    Base::BlockFromHost(host, pool, block);
  }
  void Finish() override {
    Base::Finish();
    link_->num_unfinished = 0;
  }

 private:
  const CpuDevice::Parts parts_;
  const std::shared_ptr<HostLink> link_;
};

// Models installed from now on are on a device with memory of its own.
inline void UseFakeDevice(Engine& engine, std::shared_ptr<HostLink> link) {
  TestingAccess::SetDeviceMaker(engine, [link](CpuDevice::Parts parts) -> std::shared_ptr<Device> {
    if (TestsUseSim()) return std::make_shared<LinkedDevice<SimDevice>>(std::move(parts), link);
    return std::make_shared<LinkedDevice<CpuDevice>>(std::move(parts), link);
  });
}

// Sets CPU_CACHE_RATIO during its lifetime. An engine reads the variable at its first install.
struct CacheRatio : ScopedVariable {
  explicit CacheRatio(const char* ratio) : ScopedVariable("CPU_CACHE_RATIO", ratio) {}
};

}  // namespace allspark::testing
