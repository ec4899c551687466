#include "ops/cpu/cpu_device.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "ops/cpu/kv_layout.h"
#include "platform/system_limits.h"
#include "sampling/host_sampler.h"

namespace allspark {
namespace {

using kernels::PagedKv;

template <typename T>
std::shared_ptr<T> PointerTo(T& object) {
  return std::shared_ptr<T>(std::shared_ptr<void>(), &object);
}

}  // namespace

Result<const kernels::KernelTable*> ChooseKernels(const std::string& isa) {
  const kernels::KernelTable* table =
      isa.empty() ? kernels::DefaultTable() : kernels::FindTable(isa);
  if (table != nullptr) return table;
  std::string names;
  for (const kernels::KernelTable* available : kernels::AvailableTables()) {
    names += std::string(names.empty() ? "" : ", ") + available->name;
  }
  const char* const variable = std::getenv("ALLSPARK_CPU_ISA");
  const std::string given =
      isa.empty() ? "ALLSPARK_CPU_ISA is '" + std::string(variable != nullptr ? variable : "")
                  : "isa is '" + isa;
  return Status::InvalidArgument(
      given + "', which names no instruction set of this machine; it has: " + names);
}

CpuDevice::Parts CpuDevice::Parts::NotOwned(Allocator& allocator, ThreadPool& pool,
                                            const kernels::KernelTable& kernels) {
  return {PointerTo(allocator), PointerTo(pool), &kernels};
}

int64_t CpuDevice::Parts::host_cache_bytes() const {
  return static_cast<int64_t>(cpu_cache_ratio * static_cast<double>(AvailableMemory().bytes));
}

CpuDevice::CpuDevice(Parts parts) : parts_(std::move(parts)), ops_(*parts_.kernels, *parts_.pool) {}

DeviceRoom CpuDevice::room() const {
  const int64_t reserved = parts_.allocator->Stats().largest_free_bytes;
  MemoryBound available = reserved > 0 ? MemoryForReserved() : AvailableMemory();
  return {available.bytes, reserved > 0 ? reserved : available.bytes, std::move(available.source)};
}

std::unique_ptr<Sampler> CpuDevice::MakeSampler(int64_t vocab_size) const {
  return std::make_unique<HostSampler>(vocab_size, *parts_.kernels, parts_.pool.get());
}

int64_t CpuDevice::KvBlockBytes(const KvShape& shape) const { return cpu::KvBlockBytes(shape); }

void CpuDevice::PlaceKv(const KvPool& pool) {
  if (parts_.numa == nullptr) return;
  parts_.numa->Bind(pool.data, pool.shape.kv_heads, pool.num_blocks * cpu::KvHeadBytes(pool.shape));
}

// Threads copy what they will read. So their memory is theirs also where it cannot be bound.
void CpuDevice::CopyWeight(void* device, const void* host, size_t bytes, int pieces) {
  if (parts_.numa == nullptr) return ops_.Upload(device, host, bytes);
  if (bytes == 0) return;
  auto* const to = static_cast<unsigned char*>(device);
  const auto* const from = static_cast<const unsigned char*>(host);
  const auto size = static_cast<int64_t>(bytes);
  for (int piece = 0; piece < pieces; ++piece) {
    const int64_t begin = size * piece / pieces, end = size * (piece + 1) / pieces;
    parts_.numa->Bind(to + begin, end - begin, 1);
  }
  // The threads' shares of the first piece, then those of the next.
  const int64_t num_threads = parts_.pool->num_threads(), shares = pieces * num_threads;
  parts_.pool->ForEachThread([&](int thread) {
    for (int64_t share = thread; share < shares; share += num_threads) {
      const int64_t begin = size * share / shares, end = size * (share + 1) / shares;
      std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
    }
  });
}

void CpuDevice::CopyBlock(const KvPool& pool, int32_t from, int32_t to) {
  cpu::ForEachPart(pool, [&](const PagedKv& kv, const PagedKv::Side& side, int64_t head) {
    std::memcpy(kv.PartAt(to, side, head), kv.PartAt(from, side, head),
                static_cast<size_t>(side.block_stride));
  });
}

void CpuDevice::BlockToHost(const KvPool& pool, int32_t block, void* host) {
  auto* to = static_cast<unsigned char*>(host);
  cpu::ForEachPart(pool, [&](const PagedKv& kv, const PagedKv::Side& side, int64_t head) {
    std::memcpy(to, kv.PartAt(block, side, head), static_cast<size_t>(side.block_stride));
    to += side.block_stride;
  });
}

void CpuDevice::BlockFromHost(const void* host, const KvPool& pool, int32_t block) {
  const auto* from = static_cast<const unsigned char*>(host);
  cpu::ForEachPart(pool, [&](const PagedKv& kv, const PagedKv::Side& side, int64_t head) {
    std::memcpy(kv.PartAt(block, side, head), from, static_cast<size_t>(side.block_stride));
    from += side.block_stride;
  });
}

}  // namespace allspark
