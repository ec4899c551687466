// A running model's device memory and what uses it: the decoder with its KV pool and arena, the
// sampler and the drafters. It can be given back and taken again. The step thread's, once it runs.
#pragma once

#include <memory>
#include <vector>

#include "engine/drafter.h"
#include "engine/installed_model.h"
#include "engine/logits_buffer.h"
#include "kv_cache/prefix_cache.h"
#include "memory/step_arena.h"
#include "model/decoder.h"
#include "ops/kv_memory.h"
#include "sampling/sampler.h"

namespace allspark {

class ModelMemory {
 public:
  // `model` outlives it.
  explicit ModelMemory(const InstalledModel& model) : model_(model) {}
  ~ModelMemory() { GiveBack(); }
  ModelMemory(const ModelMemory&) = delete;
  ModelMemory& operator=(const ModelMemory&) = delete;

  // After an error or an exception GiveBack comes next.
  Status Take();
  void GiveBack();
  bool is_taken() const { return is_taken_; }
  // Runs the code of steps on made-up batches, so that the first step takes no longer than others.
  // ALLSPARK_DISABLE_WARMUP=1 turns it off.
  void WarmUp();

  // The rest requires is_taken().
  Decoder& decoder() { return *decoder_; }
  Sampler& sampler() { return *sampler_; }
  std::span<const std::unique_ptr<Drafter>> drafters() const { return drafters_; }
  LogitsBuffer& logits() { return logits_; }
  int64_t kv_bytes() const { return kv_.bytes(); }
  // Computes the batch; its logits are the first rows of logits(), on the host.
  void Forward(const Batch& batch);
  // Copies a block within the pool, or between the pool and the host tier.
  void Copy(const BlockCopy& copy);
  void Copy(const HostCopy& copy);

 private:
  // Adds the draft model and returns its arena_bytes; 0 without one.
  Result<int64_t> AddDraftModel();
  void WarmUpPrefill();
  void WarmUpDecodes();

  const InstalledModel& model_;
  bool is_taken_ = false;
  std::vector<unsigned char> host_blocks_;  // of the prefix cache's second tier
  KvMemory kv_;
  StepArena arena_;
  LogitsBuffer logits_;
  // These refer to the rest.
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<Sampler> sampler_;
  std::vector<std::unique_ptr<Drafter>> drafters_;
};

}  // namespace allspark
