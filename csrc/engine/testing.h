// Access to the engine's internals for tests and for the Python `testing` submodule; not installed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "allspark/engine.h"
#include "engine/step_events.h"
#include "memory/allocator.h"
#include "ops/cpu/cpu_device.h"
#include "sampling/logprobs.h"

namespace allspark {

using DeviceMaker = std::function<std::shared_ptr<Device>(CpuDevice::Parts)>;

struct TestingAccess {
  // Events of the model's step thread go to `hook`; the model must not be Running.
  static Status SetStepHook(Engine& engine, const std::string& model_name, StepHook hook);
  // Models installed from now on compute on what `maker` makes; null: on the CPU.
  static void SetDeviceMaker(Engine& engine, DeviceMaker maker);
  // The same for engines made from now on; set before there are threads.
  static DeviceMaker& DefaultDeviceMaker();
  // Replaces the region that the engine would make at its first install. Other settings that the
  // install would read from the environment are read now.
  static void SetAllocator(Engine& engine, std::shared_ptr<Allocator> allocator);
  // Models installed from now on compute with `table`, which outlives them; null: with the table
  // of this processor.
  static void SetKernelTable(Engine& engine, const kernels::KernelTable* table);
  // Models installed from now on find the machine's NUMA nodes in `directory` (ReadNumaNodes).
  static void SetNumaDirectory(Engine& engine, std::string directory);
  // The device allocator's statistics.
  static AllocatorStats DeviceStats(Engine& engine);
};

// Names of the kernel tables this machine can run, weakest first.
std::vector<std::string> KernelTableNames();

struct ForwardOptions {
  std::vector<int64_t>
      chunk_sizes;  // tokens per forward, the last one repeated; empty: all at once
  int64_t num_threads = 1;
  std::string isa;  // "" or a kernel table's name
  int64_t block_size = 32;
  CacheMode cache_mode = CacheMode::kDefault;
  double rope_scaling_factor = 0;
  bool use_logn_attn = false;
};

// Logits of every position of `ids`, [ids.size(), vocab_size] row-major, straight from a decoder:
// no scheduler, no sampler. The model comes from `image`, or from the two files when it is null.
Result<std::vector<float>> ForwardLogits(std::shared_ptr<const ModelImage> image,
                                         const std::string& graph_path,
                                         const std::string& param_path,
                                         const std::vector<int32_t>& ids,
                                         const ForwardOptions& options);

struct SampledRows {
  std::vector<int32_t> tokens;  // one per seed
  std::vector<float> logits;    // as the last choice saw them: processed, before temperature
  RowLogprobs logprobs;         // of the last choice, where the config asks for them
};

// Chooses the token after `prompt` and `output` from `logits` once per seed, as the step loop does
// for a request with this config; whether the request would have ended before does not matter.
Result<SampledRows> SampleTokens(const GenerationConfig& config, const std::vector<int64_t>& prompt,
                                 const std::vector<int64_t>& output,
                                 const std::vector<float>& logits,
                                 const std::vector<int64_t>& seeds);

}  // namespace allspark
