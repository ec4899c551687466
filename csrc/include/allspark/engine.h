// Engine: installs, starts, stops and releases models, and starts requests on them.
//
// Requests are asynchronous: StartRequest checks the input, copies the tokens, and returns a handle
// and a queue at once; the model's step thread does the rest. Every call is thread-safe; none waits
// for a step except where it says so. A call for which the heap has no memory changes nothing: it
// returns ResourceExhausted if it returns a Status, otherwise it throws std::bad_alloc. An engine
// cannot be used in a fork of its process. Contract: csrc/engine/README.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "allspark/config.h"
#include "allspark/metrics.h"
#include "allspark/result_queue.h"
#include "allspark/status.h"
#include "allspark/token_mask.h"

namespace [[gnu::visibility("default")]] allspark {

// A request's identity, unique within the process; copyable, never dangling.
struct RequestHandle {
  uint64_t id = 0;
  bool operator==(const RequestHandle&) const = default;
};

struct StartedRequest {
  RequestHandle handle;
  std::shared_ptr<ResultQueue> queue;
  // With num_return_sequences above 1: the second best sequence and so on. All are one request:
  // stopping or releasing one handle stops all, and they end together.
  std::vector<StartedRequest> next_best = {};
};

enum class ModelState : int { kInitial = 0, kRunning = 1, kStop = 2, kReleased = 3 };
std::string_view ModelStateName(ModelState state);

// What StopModel does with requests that have not ended.
enum class StopMode : int {
  kCancel = 0,  // end them after the running step, reason kCancelled
  kDrain = 1,   // deny new ones, finish these first
};

// An installed model and the memory it needs, known before it starts (a span is a KV block).
struct ModelInfo {
  std::string model_name;
  std::string architecture;  // of the checkpoint, such as "LlamaForCausalLM"
  std::string source;        // the files, or the image in memory
  // 16 hexadecimal digits: a hash of spec and weights. Models with the same are the same.
  std::string model_digest;
  int64_t vocab_size = 0, hidden_size = 0, num_layers = 0;
  int64_t engine_max_length = 0, engine_max_batch = 0;
  // What the KV pool will hold: tokens, blocks, and requests of engine_max_length at once.
  CacheMode cache_mode = CacheMode::kDefault;
  int64_t total_token = 0, total_blocks = 0, block_size = 0;
  int64_t num_longest_request = 0;
  // A token's keys and values in all layers, those of the draft model included.
  int64_t bytes_per_token = 0;
  // Weights stay in their files or their image. start_model takes the rest: the KV pool, and the
  // scratch memory of a step (activations, logits, tables).
  int64_t weight_bytes = 0, kv_pool_bytes = 0, work_bytes = 0;

  static constexpr auto Fields() {
    using C = ModelInfo;
    return std::make_tuple(
        Field{"model_name", &C::model_name}, Field{"architecture", &C::architecture},
        Field{"source", &C::source}, Field{"model_digest", &C::model_digest},
        Field{"vocab_size", &C::vocab_size}, Field{"hidden_size", &C::hidden_size},
        Field{"num_layers", &C::num_layers}, Field{"engine_max_length", &C::engine_max_length},
        Field{"engine_max_batch", &C::engine_max_batch}, Field{"cache_mode", &C::cache_mode},
        Field{"total_token", &C::total_token}, Field{"total_span", &C::total_blocks},
        Field{"span_size", &C::block_size}, Field{"num_longest_request", &C::num_longest_request},
        Field{"bytes_per_token", &C::bytes_per_token}, Field{"weight_bytes", &C::weight_bytes},
        Field{"kv_pool_bytes", &C::kv_pool_bytes}, Field{"work_bytes", &C::work_bytes});
  }
};
// "name=value, name=value", in the order of Fields().
std::string ToString(const ModelInfo& info);

// A snapshot of one model's counters (DashInfer's AsEngineStat, whose spans are blocks here).
struct EngineStat {
  std::string model_name;
  std::string kernel_table;  // the kernels that run it: "avx2", "neon_bf16", ...
  // cached_blocks: free blocks that the prefix cache keeps. block_size: in tokens.
  int64_t total_blocks = 0, used_blocks = 0, free_blocks = 0, cached_blocks = 0, block_size = 0;
  int64_t total_token = 0, free_token = 0;
  int64_t pending_request = 0, running_request = 0;
  int64_t blocked_request = 0;      // StartRequest calls that wait for room
  int64_t output_tensor_bytes = 0;  // of requests that wait or run
  int64_t total_device_memory_pool_size = 0, used_device_memory_pool_size = 0;  // bytes
  int64_t total_generated_token = 0;
  int64_t total_prefill_token = 0;  // including recomputed ones after a preemption
  double generate_token_persec = 0, process_token_persec = 0;  // over the last seconds
  double token_usage_percentage = 0;
  int64_t prefix_cache_hit_token = 0, prefix_cache_miss_token = 0;  // from the cache; computed
  double prefix_cache_hit_rate = 0, prefix_cache_miss_rate = 0;
  int64_t num_preemptions = 0, num_steps = 0;
  int64_t total_draft_token = 0, total_accepted_draft_token = 0;
  // Requests that ended, by their FinishReason; and those denied because the queue or their tensors
  // had no room, or a deadline or the model's stop came while they waited for it.
  int64_t finished_stop = 0, finished_length = 0, finished_cancelled = 0;
  int64_t finished_deadline = 0, finished_interrupted = 0, finished_error = 0;
  int64_t denied_request = 0;

  static constexpr auto Fields() {
    using C = EngineStat;
    return std::make_tuple(
        Field{"model_name", &C::model_name}, Field{"kernel_table", &C::kernel_table},
        Field{"total_span", &C::total_blocks}, Field{"used_span", &C::used_blocks},
        Field{"free_span", &C::free_blocks}, Field{"cached_span", &C::cached_blocks},
        Field{"span_size", &C::block_size}, Field{"total_token", &C::total_token},
        Field{"free_token", &C::free_token}, Field{"pending_request", &C::pending_request},
        Field{"running_request", &C::running_request},
        Field{"blocked_request", &C::blocked_request},
        Field{"output_tensor_bytes", &C::output_tensor_bytes},
        Field{"total_device_memory_pool_size", &C::total_device_memory_pool_size},
        Field{"used_device_memory_pool_size", &C::used_device_memory_pool_size},
        Field{"total_generated_token", &C::total_generated_token},
        Field{"total_prefill_token", &C::total_prefill_token},
        Field{"generate_token_persec", &C::generate_token_persec},
        Field{"process_token_persec", &C::process_token_persec},
        Field{"token_usage_percentage", &C::token_usage_percentage},
        Field{"prefix_cache_hit_token", &C::prefix_cache_hit_token},
        Field{"prefix_cache_miss_token", &C::prefix_cache_miss_token},
        Field{"prefix_cache_hit_rate", &C::prefix_cache_hit_rate},
        Field{"prefix_cache_miss_rate", &C::prefix_cache_miss_rate},
        Field{"num_preemptions", &C::num_preemptions}, Field{"num_steps", &C::num_steps},
        Field{"total_draft_token", &C::total_draft_token},
        Field{"total_accepted_draft_token", &C::total_accepted_draft_token},
        Field{"finished_stop", &C::finished_stop}, Field{"finished_length", &C::finished_length},
        Field{"finished_cancelled", &C::finished_cancelled},
        Field{"finished_deadline", &C::finished_deadline},
        Field{"finished_interrupted", &C::finished_interrupted},
        Field{"finished_error", &C::finished_error}, Field{"denied_request", &C::denied_request});
  }
};

// A serialised model held in memory instead of in files. Opaque; made by the model writer.
class ModelImage;
// A LoRA adapter held in memory instead of in a file. Opaque; made by LoraSerializer.
class LoraImage;

class Engine {
 public:
  Engine();
  // Ends every request (reason kCancelled), stops and releases every model. Queues stay readable.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // FailedPrecondition in a fork of the process that created this engine; there, every call that
  // returns a Status returns it. ListModels and GetMetrics return nothing in a fork, and the
  // destructor stops nothing and frees nothing. Any process may create engines of its own.
  Status CheckProcess() const;

  // Makes an in-memory model available to InstallModel under `model_name`, also as a draft model.
  // The engine holds the image until a model that was installed with it is released. After that, it
  // can be installed again as long as the caller holds the image.
  Status RegisterImage(const std::string& model_name, std::shared_ptr<const ModelImage> image);

  // Opens and verifies the model; state Initial. Fails when the name is taken, a file is
  // damaged, or the KV pool could not hold one request of engine_max_length.
  Status InstallModel(const RuntimeConfig& config);
  // Initial | Stop -> Running. Takes memory, starts the step thread, warms up. Blocks for that.
  Status StartModel(const std::string& model_name);
  // Running -> Stop. Blocks until the step thread has ended; timeout_ms < 0 waits for ever,
  // otherwise a drain that takes longer turns into kCancel. So does one whose `cancelled` returns
  // true; it is called several times a second and must not throw. While a drain waits, a second
  // stop joins it, or with kCancel cuts it short; other calls that change the model are refused.
  // Within `cancelled` itself, kCancel returns at once, and the drain ends after it.
  Status StopModel(const std::string& model_name, StopMode mode = StopMode::kCancel,
                   int64_t timeout_ms = -1, const std::function<bool()>& cancelled = nullptr);
  // Initial | Stop -> Released, and the name is free again.
  Status ReleaseModel(const std::string& model_name);
  // UnloadDeviceMemory frees the KV pool, scratch memory and mapped weights of a running model
  // after the current step. It keeps adapters, and weights in a memory image. Running and new
  // requests wait for LoadDeviceMemory and then give the same tokens; the prefix cache and its pins
  // are lost. LoadDeviceMemory blocks for the warm-up; without enough memory (ResourceExhausted)
  // the model stays unloaded.
  Status UnloadDeviceMemory(const std::string& model_name);
  Status LoadDeviceMemory(const std::string& model_name);
  Result<ModelState> GetModelState(const std::string& model_name) const;
  // What an installed model is: its serialised DecoderSpec (proto/allspark.proto).
  Result<std::string> GetModelSpec(const std::string& model_name) const;
  // Installed models, in the order of installation.
  std::vector<std::string> ListModels() const;

  // Returns at once. An accepted request always reaches a terminal status.
  // `token_mask`: which tokens may be chosen, for guided decoding; null: all.
  // If the queue is full and queue_full_policy is "block", the call waits for room: until
  // StopModel, until timeout_ms is over, or until `cancelled` returns true. `cancelled` is called
  // several times a second and must not throw. Waiting calls enter in the order of their arrival.
  Result<StartedRequest> StartRequest(const std::string& model_name,
                                      std::span<const int64_t> prompt_ids,
                                      const GenerationConfig& config,
                                      std::shared_ptr<TokenMask> token_mask = nullptr,
                                      const std::function<bool()>& cancelled = nullptr);
  // Ends the request after the running step at the latest; stopping a finished one is OK.
  // `reason`: kStop if the caller found its output complete, for example at a stop string. Beams
  // and samples that are ranked at their end are always cancelled.
  Status StopRequest(const std::string& model_name, RequestHandle handle,
                     FinishReason reason = FinishReason::kCancelled);
  // Stops it if it runs and forgets the handle; the queue stays readable.
  Status ReleaseRequest(const std::string& model_name, RequestHandle handle);
  // Blocks until the request is terminal; timeout_ms < 0 waits for ever. `cancelled` ends the wait
  // as it does in StartRequest.
  Status SyncRequest(const std::string& model_name, RequestHandle handle, int64_t timeout_ms = -1,
                     const std::function<bool()>& cancelled = nullptr);
  // Waits for all of them; unknown handles do not end the wait. Returns the first failure.
  Status SyncRequests(const std::string& model_name, std::span<const RequestHandle> handles,
                      int64_t timeout_ms = -1, const std::function<bool()>& cancelled = nullptr);
  Status SyncAllRequests(const std::string& model_name, int64_t timeout_ms = -1,
                         const std::function<bool()>& cancelled = nullptr);

  // Loads a LoRA adapter (a .aslora file, or an image in memory). Requests then select it by their
  // lora_name; one batch may mix adapters and the base model. The adapter takes device memory until
  // it is unloaded or the model is released. The statuses are DashInfer's: LORA_ALREADY_LOADED,
  // LORA_NUM_EXCEED_LIMIT_ERROR above lora_max_num, LORA_RANK_EXCEED_LIMIT_ERROR above
  // lora_max_rank, PARAM_ERROR if the adapter does not fit the model.
  Status LoadLora(const std::string& model_name, const std::string& lora_name,
                  const std::string& path);
  Status LoadLora(const std::string& model_name, const std::string& lora_name,
                  std::shared_ptr<const LoraImage> image);
  // LORA_NOT_FOUND; LORA_IN_USE while requests that have not ended use it.
  Status UnloadLora(const std::string& model_name, const std::string& lora_name);
  // Their names, in alphabetical order.
  Result<std::vector<std::string>> ListLoras(const std::string& model_name) const;

  // The prefix cache keeps keys and values of computed tokens in blocks, which requests with the
  // same prefix reuse. These calls concern the cached blocks of the longest prefix of `prompt_ids`,
  // as computed with the adapter `lora_name` ("": the base model). They return the number of tokens
  // in these blocks, and wait for the current step at most.
  Result<int64_t> FindPrefix(const std::string& model_name, std::span<const int64_t> prompt_ids,
                             const std::string& lora_name = "");
  // Keeps the blocks that are in the device's memory until UnpinPrefix (once for each pin) or
  // ClearPrefixCache. Pinned blocks must leave room for one request of engine_max_length; a pin
  // beyond that is refused.
  Result<int64_t> PinPrefix(const std::string& model_name, std::span<const int64_t> prompt_ids,
                            const std::string& lora_name = "");
  // 0: neither these tokens nor a prefix of them is pinned.
  Result<int64_t> UnpinPrefix(const std::string& model_name, std::span<const int64_t> prompt_ids,
                              const std::string& lora_name = "");
  // Evicts all blocks that no running request uses, pinned or not.
  Result<int64_t> ClearPrefixCache(const std::string& model_name);

  // From InstallModel on, in every state.
  Result<ModelInfo> GetModelInfo(const std::string& model_name) const;
  Result<EngineStat> GetEngineStat(const std::string& model_name) const;
  // Writes the current trace, if the model keeps one (trace_path).
  Status WriteTrace(const std::string& model_name, const std::string& path) const;
  // A table of the time of each operation since InstallModel, if the model measures it
  // (op_profiling), with the rates of bytes read (weights and KV cache) and of operations on them.
  // The steps of a draft model and the warm-up are not included. DashInfer's GetOpProfilingInfo.
  Result<std::string> GetOpProfilingInfo(const std::string& model_name) const;
  // The metrics of all installed models.
  std::vector<Metric> GetMetrics() const;
  // Every change of every queue of this engine is signalled here.
  std::shared_ptr<CompletionSet> completions() const;

  // "M.m.p/(GitSha1:xxxxxxxx)".
  static std::string Version();

 private:
  friend struct TestingAccess;  // engine/testing.h
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace allspark
