// One installed model: its weights, and while it runs its memory, decoder, scheduler and step
// thread. Every public call may come from any thread at any time; Start, Stop and Release run one
// after the other, but a cancel cuts another thread's drain short. Contract: engine/README.md.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "allspark/engine.h"
#include "engine/draft_model.h"
#include "engine/request.h"
#include "engine/step_events.h"
#include "engine/step_outputs.h"
#include "kernels/kernel_table.h"
#include "memory/allocator.h"
#include "memory/step_arena.h"
#include "model/decoder.h"
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
};

class ModelInstance {
 public:
  // Opens nothing: `reader` is open and verified, and so is that of the draft model, null where
  // there is none. Checks that the KV pool can be had and can hold one request of
  // engine_max_length.
  static Result<std::unique_ptr<ModelInstance>> Create(
      const RuntimeConfig& config, std::unique_ptr<ModelReader> reader,
      std::unique_ptr<ModelReader> draft_reader, DeviceContext device,
      std::shared_ptr<CompletionSetImpl> engine_set);
  ~ModelInstance();

  const RuntimeConfig& config() const { return config_; }
  ModelState state() const { return state_.load(); }

  Status Start();
  Status Stop(StopMode mode, int64_t timeout_ms);
  // Initial | Stop -> Released: no Start succeeds any more.
  Status Release();

  Result<StartedRequest> Submit(uint64_t request_id, std::span<const int64_t> prompt_ids,
                                const GenerationConfig& generation,
                                std::shared_ptr<TokenMask> token_mask);
  Status StopRequest(RequestHandle handle);
  Status ReleaseRequest(RequestHandle handle);
  Status SyncRequest(RequestHandle handle, int64_t timeout_ms);
  Status SyncAll(int64_t timeout_ms);
  EngineStat Stat() const;

  enum class PrefixOp { kFind, kPin, kUnpin, kClear };
  // Returns a number of tokens; waits for the running step.
  Result<int64_t> CallPrefixCache(PrefixOp op, std::span<const int64_t> prompt_ids);

  // Called by the step thread around each step; set before Start. Tests only.
  void set_step_hook(StepHook hook, void* context) { hook_ = hook, hook_context_ = context; }

 private:
  // Everything that exists only while the model runs; only the step thread touches it then.
  struct Running {
    Buffer kv_buffer;
    KvPool kv;
    StepArena arena;
    Buffer logits_buffer;
    std::unique_ptr<Decoder> decoder;
    std::unique_ptr<Scheduler> scheduler;
    std::unique_ptr<Sampler> sampler;
    std::vector<std::unique_ptr<Drafter>> drafters;
    std::vector<Request*> drafting;  // those of one drafter
    // One step's batch, reserved for the largest.
    std::vector<int32_t> tokens, positions;
    std::vector<BatchSequence> sequences;
    std::vector<SamplingRow> rows;
    std::vector<Request*> sampled;  // by row
    std::vector<Request*> prompts;  // prompt_only requests that this step completes
    std::unique_ptr<StepOutputs> outputs;
    std::vector<Request*> changed;  // those that got tokens in this step and have not ended
    // Requests that ended within the running step, kept until it is over: its plan points at them.
    std::vector<std::shared_ptr<Request>> ended;
    bool in_step = false;
  };

  ModelInstance(const RuntimeConfig& config, std::unique_ptr<ModelReader> reader,
                DeviceContext device, std::shared_ptr<CompletionSetImpl> engine_set);

  Status CheckDraftModel() const;
  // One block of the KV pool, and its pair in the draft model's.
  Result<int64_t> BlockBytes() const;
  Status SizePool();
  // True when a drain was under way and will now cancel.
  bool CutDrainShort();
  Result<std::unique_ptr<Running>> MakeRunning() const;
  // Adds the draft model; its arena_bytes, 0 where there is none.
  Result<int64_t> AddDraftModel(Running& running) const;
  void WarmUp(Running& running) const;

  // The step thread.
  void StepLoop();
  bool TakeMail();  // false: the loop ends
  void RunStep();
  void BuildBatch(const std::vector<PlannedChunk>& plan, Batch& batch);
  void OfferDrafts();
  void DraftTokens(const std::vector<PlannedChunk>& plan);
  void WriteOutputs(int64_t num_logits_rows);
  void SampleAndAppend();
  void ReportLogits() const;
  // False: the request has ended.
  bool AppendSampled(Request* request, const SamplingRow& row, int64_t now_us);
  // Drops the rows of the step whose request ends for want of its mask.
  void AwaitMasks();
  // False: the request has ended.
  bool AwaitMask(Request* request, int64_t deadline_us, SamplingRow& row);
  bool IsStopping(const Request& request) const;
  void FailStep(const std::vector<PlannedChunk>& plan, const std::string& message);
  void EndRequest(Request* request, FinishReason reason, std::string error);
  // Groups, in step_groups.cc. The next beams, once the candidates of all are there.
  void AdvanceSearch(Request* beam, const SamplingRow& row);
  // False: it was not the last of its group.
  bool EndSample(Request* sample, FinishReason reason);
  void AddToScheduler(Request* request);
  void RemoveFromScheduler(Request* request);
  void EndAll(FinishReason reason, const std::string& error);
  void UpdateCounters(const std::vector<PlannedChunk>& plan);
  void PublishUsage();

  struct PrefixCall;
  void AnswerPrefixCalls(PrefixCall* calls);
  Result<int64_t> AnswerPrefixCall(const PrefixCall& call);
  void FailPrefixCallsLocked();
  void FinishPrefixCallsLocked(PrefixCall* calls);

  // Whether the model takes `what`; the message says why not.
  Status CheckAcceptingLocked(const char* what) const;
  Result<std::shared_ptr<Request>> Find(RequestHandle handle) const;
  void PostStopLocked(const std::shared_ptr<Request>& request);
  // Of requests; the list is the step thread's by now.
  static void DropStops(Request* head);

  // Constant after construction.
  RuntimeConfig config_;
  std::unique_ptr<ModelReader> reader_;
  std::unique_ptr<ModelReader> draft_reader_;  // null: no draft model
  DeviceContext device_;
  std::shared_ptr<CompletionSetImpl> engine_set_;
  DecoderOptions decoder_options_;
  int64_t chunk_tokens_ = 0;
  int64_t num_blocks_ = 0;
  RequestLimits limits_;
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
  std::condition_variable prefix_calls_done_;
  // Guarded by mutex_.
  std::unordered_map<uint64_t, std::shared_ptr<Request>> requests_;
  Request* new_head_ = nullptr;
  Request* new_tail_ = nullptr;
  Request* stop_head_ = nullptr;
  PrefixCall* prefix_calls_ = nullptr;  // on their callers' stacks
  bool accepting_ = false;
  bool stopping_ = false;
  StopMode stop_mode_ = StopMode::kCancel;
  bool loop_running_ = false;
  int64_t num_live_ = 0;  // accepted and not ended

  // Counters, written by the step thread.
  struct Counters {
    std::atomic<int64_t> generated{0}, prefilled{0}, steps{0}, preemptions{0};
    std::atomic<int64_t> drafted{0}, accepted{0};
    std::atomic<int64_t> running{0}, used_blocks{0}, cached_blocks{0}, prefix_hits{0};
    std::atomic<int64_t> window_begin_us{0}, window_generated{0}, window_prefilled{0};
    std::atomic<double> generated_per_second{0}, prefilled_per_second{0};
  };
  Counters counters_;
};

}  // namespace allspark
