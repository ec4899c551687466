// Device: where a model's steps are computed, with its memory, its operations and the host's part
// of the work. The engine makes one for each number of threads; models share it. A new kind of
// device is a folder beside ops/cpu with a Device and a DeviceOps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/kernel_table.h"
#include "memory/allocator.h"
#include "ops/device_ops.h"
#include "ops/kv_pool.h"
#include "platform/thread_pool.h"
#include "sampling/sampler.h"

namespace allspark {

// Memory that a model could take now.
struct DeviceRoom {
  int64_t bytes = 0;
  int64_t largest = 0;  // in one piece
  std::string source;   // what sets `bytes`, for messages
};

class Device {
 public:
  virtual ~Device() = default;

  virtual Allocator* allocator() const = 0;
  virtual DeviceOps& ops() const = 0;
  virtual DeviceRoom room() const = 0;

  // Bytes of a block of the KV pool, all layers. How it lies in the pool is the device's choice; so
  // is the order of its bytes on the host.
  virtual int64_t KvBlockBytes(const KvShape& shape) const = 0;
  // Puts a new pool's memory where its operations want it.
  virtual void PlaceKv(const KvPool& /*pool*/) {}
  // Copies of KV blocks, in the order of all operations. BlockToHost may still be writing when it
  // returns: BlockFromHost of the same memory waits for it, and Finish comes before the memory is
  // freed. They throw on failure.
  virtual void CopyBlock(const KvPool& pool, int32_t from, int32_t to) = 0;
  virtual void BlockToHost(const KvPool& pool, int32_t block, void* host) = 0;
  virtual void BlockFromHost(const void* host, const KvPool& pool, int32_t block) = 0;
  // Waits until nothing that it was given reads or writes memory any more. Does not throw: what
  // failed has ended, too.
  virtual void Finish() = 0;

  // False: its memory is the host's.
  virtual bool has_own_memory() const = 0;
  // Whether it computes with copies of weights; otherwise it reads them where the host has them.
  virtual bool copies_weights() const { return has_own_memory(); }
  // Copies a weight to its memory. The weight has `pieces` of equal size that a product reads side
  // by side, such as gate and up.
  virtual void CopyWeight(void* device, const void* host, size_t bytes, int /*pieces*/) {
    ops().Upload(device, host, bytes);
  }
  // Room in the host's memory for blocks of the prefix cache that the device has none for.
  virtual int64_t host_cache_bytes() const = 0;

  // The sampler of a model whose rows of logits have vocab_size floats in this device's memory.
  virtual std::unique_ptr<Sampler> MakeSampler(int64_t vocab_size) const = 0;

  // What the host computes for its models: packing, tables, log-probabilities of prompts.
  virtual ThreadPool& host_pool() const = 0;
  virtual const kernels::KernelTable& host_kernels() const = 0;
};

}  // namespace allspark
