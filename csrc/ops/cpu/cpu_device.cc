#include "ops/cpu/cpu_device.h"

#include <cstring>
#include <utility>

#include "platform/system_limits.h"
#include "sampling/host_sampler.h"

namespace allspark {
namespace {

template <typename T>
std::shared_ptr<T> NotOwned(T& object) {
  return std::shared_ptr<T>(std::shared_ptr<void>(), &object);
}

}  // namespace

CpuDevice::CpuDevice(Parts parts) : parts_(std::move(parts)), ops_(*parts_.kernels, *parts_.pool) {}

CpuDevice::CpuDevice(Allocator& allocator, ThreadPool& pool, const kernels::KernelTable& kernels)
    : CpuDevice(Parts{NotOwned(allocator), NotOwned(pool), &kernels, 0}) {}

DeviceRoom CpuDevice::room() const {
  const int64_t reserved = parts_.allocator->Stats().largest_free_bytes;
  MemoryBound available = reserved > 0 ? MemoryForReserved() : AvailableMemory();
  return {available.bytes, reserved > 0 ? reserved : available.bytes, std::move(available.source)};
}

std::unique_ptr<Sampler> CpuDevice::MakeSampler(int64_t vocab_size) const {
  return std::make_unique<HostSampler>(vocab_size, *parts_.kernels, parts_.pool.get());
}

void CpuDevice::CopyBlock(const KvBlock& from, const KvBlock& to) {
  for (int64_t i = 0; i < from.num_parts(); ++i) {
    const KvBlock::Part part = from.part(i);
    std::memcpy(to.part(i).data, part.data, static_cast<size_t>(part.bytes));
  }
}

void CpuDevice::BlockToHost(const KvBlock& device, void* host) {
  auto* to = static_cast<unsigned char*>(host);
  for (int64_t i = 0; i < device.num_parts(); ++i) {
    const KvBlock::Part part = device.part(i);
    std::memcpy(to, part.data, static_cast<size_t>(part.bytes));
    to += part.bytes;
  }
}

void CpuDevice::BlockFromHost(const void* host, const KvBlock& device) {
  const auto* from = static_cast<const unsigned char*>(host);
  for (int64_t i = 0; i < device.num_parts(); ++i) {
    const KvBlock::Part part = device.part(i);
    std::memcpy(part.data, from, static_cast<size_t>(part.bytes));
    from += part.bytes;
  }
}

}  // namespace allspark
