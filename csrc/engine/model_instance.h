// One installed model: its weights, and while it runs its memory, decoder, scheduler and step
// thread. Every public call may come from any thread at any time; Start, Stop and Release run one
// after the other, but a cancel cuts another thread's drain short. Contract: engine/README.md.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "allspark/engine.h"
#include "engine/admission.h"
#include "engine/draft_model.h"
#include "engine/engine_log.h"
#include "engine/host_copier.h"
#include "engine/lora_registry.h"
#include "engine/metrics.h"
#include "engine/request.h"
#include "engine/step_events.h"
#include "engine/step_outputs.h"
#include "engine/step_trace.h"
#include "kernels/kernel_table.h"
#include "memory/allocator.h"
#include "memory/step_arena.h"
#include "model/decoder.h"
#include "ops/op_profile.h"
#include "platform/thread_pool.h"
#include "sampling/sampler.h"
#include "scheduler/scheduler.h"
#include "weights/model_reader.h"

namespace allspark {

// What an instance needs of its device.
struct DeviceContext {
  std::shared_ptr<Allocator> allocator;
  std::shared_ptr<ThreadPool> pool;
  const kernels::KernelTable* kernels = nullptr;
  // Of a device with memory of its own: how blocks get to the host, and room for them there.
  std::shared_ptr<HostCopier> host_copier;
  int64_t host_cache_bytes = 0;
};

class ModelInstance {
 public:
  // Opens nothing: `reader` and `draft_reader` are open and verified; `draft_reader` is null
  // without a draft model. Checks that there is memory for the KV pool, and that the pool can hold
  // one request of engine_max_length.
  static Result<std::unique_ptr<ModelInstance>> Create(
      const RuntimeConfig& config, std::unique_ptr<ModelReader> reader,
      std::unique_ptr<ModelReader> draft_reader, DeviceContext device,
      std::shared_ptr<CompletionSetImpl> engine_set);
  ~ModelInstance();

  const RuntimeConfig& config() const { return config_; }
  const proto::DecoderSpec& spec() const { return reader_->spec(); }
  ModelState state() const { return state_.load(); }

  Status Start();
  Status Stop(StopMode mode, int64_t timeout_ms);
  // Initial | Stop -> Released: no Start succeeds any more.
  Status Release();
  // Running: gives the memory of the device back, and takes it again.
  Status UnloadMemory();
  Status LoadMemory();

  Result<StartedRequest> Submit(uint64_t request_id, std::span<const int64_t> prompt_ids,
                                const GenerationConfig& generation,
                                std::shared_ptr<TokenMask> token_mask,
                                const std::function<bool()>& cancelled);
  Status StopRequest(RequestHandle handle);
  Status ReleaseRequest(RequestHandle handle);
  Status SyncRequest(RequestHandle handle, int64_t timeout_ms,
                     const std::function<bool()>& cancelled);
  Status SyncAll(int64_t timeout_ms, const std::function<bool()>& cancelled);
  EngineStat Stat() const;
  Status WriteTrace(const std::string& path) const;
  Result<std::string> OpProfilingInfo() const;
  std::vector<Metric> Metrics() const { return MakeMetrics(Stat(), statistics_); }
  const ModelInfo& info() const { return info_; }

  enum class PrefixOp { kFind, kPin, kUnpin, kClear };
  // Returns a number of tokens; waits for the running step.
  Result<int64_t> CallPrefixCache(PrefixOp op, std::span<const int64_t> prompt_ids,
                                  const std::string& lora_name);

  // Packs the adapter on the caller's thread.
  Status LoadLora(const std::string& lora_name, const LoraFile& file);
  LoraRegistry& loras() { return loras_; }

  // Called by the step thread around each step; set before Start. Tests only.
  void set_step_hook(StepHook hook, void* context) { hook_ = hook, hook_context_ = context; }

 private:
  // Everything that exists only while the model runs; only the step thread touches it then.
  struct Running {
    explicit Running(const std::string& model_name) : log(model_name) {}

    bool has_memory = true;  // false: unloaded, no step runs
    Buffer kv_buffer;
    std::vector<unsigned char> host_blocks;  // of the prefix cache's second tier
    KvPool kv;
    StepArena arena;
    Buffer logits_buffer;
    std::unique_ptr<Decoder> decoder;
    std::unique_ptr<Scheduler> scheduler;
    std::unique_ptr<Sampler> sampler;
    std::vector<std::unique_ptr<Drafter>> drafters;
    std::vector<Request*> drafting;  // those of one drafter
    // One step's batch, reserved for the largest.
    std::vector<const PlannedChunk*> chunks;  // of the plan, contiguous by adapter
    std::vector<int32_t> tokens, positions;
    std::vector<BatchSequence> sequences;
    std::vector<SamplingRow> rows;
    std::vector<Request*> sampled;  // by row
    int64_t num_held = 0;           // requests that wait for their masks, at the step's begin
    std::vector<Request*> prompts;  // prompt_only requests that this step completes
    std::unique_ptr<StepOutputs> outputs;
    std::vector<Request*> changed;  // those that got tokens in this step and have not ended
    // Requests that ended within the running step, kept until it is over: its plan points at them.
    std::vector<std::shared_ptr<Request>> ended;
    bool in_step = false;
    StepRecord step;  // the current one
    EngineLog log;
  };

  ModelInstance(const RuntimeConfig& config, std::unique_ptr<ModelReader> reader,
                DeviceContext device, std::shared_ptr<CompletionSetImpl> engine_set);

  Status CheckDraftModel() const;
  // Sizes, in model_sizes.cc.
  Status SizeUp();
  void SetOptions();
  DraftModelOptions DraftOptions() const;
  // block_bytes: a block of the model and, if there is one, of the draft model.
  Status SizePool(int64_t block_bytes);
  void FillInfo(int64_t block_bytes);
  void WriteLastTrace() const;
  // True when a drain was under way and will now cancel.
  bool CutDrainShort();
  Result<std::unique_ptr<Running>> MakeRunning() const;
  // Allocates the parts of `running` that are device memory, or as large.
  Status TakeMemory(Running& running) const;
  static void GiveMemoryBack(Running& running);
  // DataLoss once weights, a draft model's included, could not be read from their files.
  Status CheckWeights() const;
  // Fails unless the model runs and its memory is loaded or not, as `has_memory` says.
  Status CheckMemory(const char* call, bool has_memory) const;
  // Adds the draft model and returns its arena_bytes; 0 without one.
  Result<int64_t> AddDraftModel(Running& running) const;
  void WarmUp(Running& running) const;

  // The step thread.
  void StepLoop();
  bool TakeMail();  // false: the loop ends
  void AwaitMail(std::unique_lock<std::mutex>& lock);
  // A request waits or runs, and the model has its memory.
  bool HasWork() const;
  void RunStep();
  // Fills Running::chunks.
  void OrderChunks(const std::vector<PlannedChunk>& plan);
  void BuildBatch(const std::vector<PlannedChunk>& plan, Batch& batch);
  // Copies blocks between the pool and the host tier, as the plan needs it.
  void CopyBlocks();
  void OfferDrafts();
  void DraftTokens(const std::vector<PlannedChunk>& plan);
  void WriteOutputs(int64_t num_logits_rows);
  void SampleAndAppend();
  void ReportLogits() const;
  // False: the request has ended.
  bool AppendSampled(Request* request, const SamplingRow& row, int64_t now_us);
  // Drops the rows whose request ends without its mask, or is held until the mask comes.
  void AwaitMasks();
  // Sets the masks that come until `until_us` in rows that have none yet; returns how many are
  // late.
  int64_t ReadMasks(int64_t until_us);
  enum class MaskRead { kLate, kThere, kRequestEnded };
  MaskRead ReadMask(Request* request, int64_t until_us);
  // Ends the hold of requests whose masks have come, or come until `until_us`.
  void ReleaseHeld(int64_t until_us);
  bool HasMail() const;
  // Ends requests in the scheduler whose deadline is over.
  void EndExpired();
  // One such request, or null.
  Request* TakeExpired(int64_t now_us) const;
  void FailStep(const std::vector<PlannedChunk>& plan, const char* message);
  void EndRequest(Request* request, FinishReason reason, const std::string& error);
  // Groups, in step_groups.cc. Chooses the next beams, once every beam has its candidates.
  void AdvanceSearch(Request* beam, const SamplingRow& row);
  // False: it was not the last of its group.
  bool EndSample(Request* sample, FinishReason reason);
  void AddToScheduler(Request* request);
  void RemoveFromScheduler(Request* request);
  void EndAll(FinishReason reason, const std::string& error);
  void CountStep(const std::vector<PlannedChunk>& plan);
  // Ends the requests that the last plan interrupted; false: there were none.
  bool EndInterrupted();
  void EndStep();
  void LogStatus();
  void CountToken(Request& request, int64_t now_us);
  void CountEnd(const Request& request, FinishReason reason, int64_t now_us);
  void PublishUsage();

  // Calls that the step thread answers between two steps, in step_calls.cc. `what` names the call
  // in the message of a refusal.
  struct StepCall;
  Result<int64_t> CallStepThread(const char* what, std::function<Result<int64_t>()> work);
  void AnswerStepCalls(StepCall* calls);
  void FailStepCallsLocked();
  void FinishStepCallsLocked(StepCall* calls);

  // Whether the model takes `what`; the message says why not.
  Status CheckAcceptingLocked(const char* what) const;
  Result<std::shared_ptr<Request>> Find(RequestHandle handle) const;
  void PostStopLocked(const std::shared_ptr<Request>& request);
  // Adds the request where handles and deadlines find it; all of it or nothing.
  void EnlistLocked(const std::shared_ptr<Request>& request);
  void DelistLocked(const Request& request);
  // Drops a list of stops, which only the step thread has by now.
  static void DropStops(Request* head);

  // Constant after construction.
  RuntimeConfig config_;
  std::unique_ptr<ModelReader> reader_;
  std::unique_ptr<ModelReader> draft_reader_;  // null: no draft model
  DeviceContext device_;
  std::shared_ptr<CompletionSetImpl> engine_set_;
  LoraRegistry loras_;
  DecoderOptions decoder_options_;
  int64_t chunk_tokens_ = 0;
  int64_t num_blocks_ = 0;
  int64_t num_host_blocks_ = 0;
  double row_cost_ = 0;  // see SchedulerConfig::draft_row_cost
  RequestLimits limits_;
  ModelInfo info_;
  std::unique_ptr<StepTrace> trace_;       // null: none is kept
  std::unique_ptr<OpProfile> op_profile_;  // null: nothing is measured
  StepHook hook_ = nullptr;
  void* hook_context_ = nullptr;

  std::mutex lifecycle_mutex_;  // held through Start, Stop and Release
  std::atomic<ModelState> state_{ModelState::kInitial};
  std::unique_ptr<Running> running_;
  std::thread step_thread_;

  // The mailbox: the one lock between callers and the step thread.
  mutable std::mutex mutex_;
  std::condition_variable mail_;
  std::condition_variable loop_ended_;
  std::condition_variable step_calls_done_;
  // Guarded by mutex_.
  std::unordered_map<uint64_t, std::shared_ptr<Request>> requests_;
  Request* new_head_ = nullptr;
  Request* new_tail_ = nullptr;
  Request* stop_head_ = nullptr;
  StepCall* step_calls_ = nullptr;  // on their callers' stacks
  bool accepting_ = false;
  bool stopping_ = false;
  StopMode stop_mode_ = StopMode::kCancel;
  bool loop_running_ = false;
  Admission admission_;  // of requests that were accepted and have not ended
  std::set<std::pair<int64_t, Request*>> deadlines_;  // of live requests that have one

  Statistics statistics_;
};

}  // namespace allspark
