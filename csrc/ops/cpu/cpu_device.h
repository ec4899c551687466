// CpuDevice: the host itself. Its memory is the host's, so Upload and Download are copies and the
// prefix cache has no second tier. With a NumaPlacement it computes with copies of weights, of
// which each thread has its share on its own node, as it has its KV heads.
#pragma once

#include <memory>
#include <string>

#include "allspark/status.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/device.h"
#include "platform/numa.h"

namespace allspark {

// The kernel table named `isa`; "": the one that ALLSPARK_CPU_ISA names, or else the fastest.
// InvalidArgument if that one cannot run here; it names those that can.
Result<const kernels::KernelTable*> ChooseKernels(const std::string& isa = "");

class CpuDevice : public Device {
 public:
  struct Parts {
    // Parts that outlive the device.
    static Parts NotOwned(Allocator& allocator, ThreadPool& pool,
                          const kernels::KernelTable& kernels);
    // Of a device with memory of its own.
    int64_t host_cache_bytes() const;

    std::shared_ptr<Allocator> allocator;
    std::shared_ptr<ThreadPool> pool;
    const kernels::KernelTable* kernels = nullptr;  // outlives the device
    // Of a device with memory of its own: the share of the host's free memory for its blocks.
    double cpu_cache_ratio = 0;
    // Of the pool's threads; null: memory lies where it is.
    std::shared_ptr<const NumaPlacement> numa = nullptr;
  };
  explicit CpuDevice(Parts parts);
  CpuDevice(Allocator& allocator, ThreadPool& pool, const kernels::KernelTable& kernels)
      : CpuDevice(Parts::NotOwned(allocator, pool, kernels)) {}

  Allocator* allocator() const override { return parts_.allocator.get(); }
  DeviceOps& ops() const override { return ops_; }
  DeviceRoom room() const override;
  int64_t KvBlockBytes(const KvShape& shape) const override;
  void PlaceKv(const KvPool& pool) override;
  void CopyBlock(const KvPool& pool, int32_t from, int32_t to) override;
  void BlockToHost(const KvPool& pool, int32_t block, void* host) override;
  void BlockFromHost(const void* host, const KvPool& pool, int32_t block) override;
  void Finish() override {}
  bool has_own_memory() const override { return false; }
  bool copies_weights() const override { return has_own_memory() || parts_.numa != nullptr; }
  void CopyWeight(void* device, const void* host, size_t bytes, int pieces) override;
  int64_t host_cache_bytes() const override { return 0; }
  std::unique_ptr<Sampler> MakeSampler(int64_t vocab_size) const override;
  ThreadPool& host_pool() const override { return *parts_.pool; }
  const kernels::KernelTable& host_kernels() const override { return *parts_.kernels; }

 protected:
  const Parts& parts() const { return parts_; }

 private:
  const Parts parts_;
  mutable CpuOps ops_;
};

}  // namespace allspark
