// One installed model and its life: Start, Stop and Release, one after the other, and what callers
// ask of it meanwhile. Every public call may come from any thread at any time. What happens in a
// step is StepLoop's, what crosses between threads Mailbox's. Contract: engine/README.md.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "allspark/engine.h"
#include "engine/installed_model.h"
#include "engine/lifecycle.h"
#include "engine/lora_registry.h"
#include "engine/mailbox.h"
#include "engine/metrics.h"
#include "engine/statistics.h"
#include "engine/step_loop.h"
#include "engine/step_trace.h"
#include "ops/op_profile.h"

namespace allspark {

class ModelInstance {
 public:
  // Opens nothing: `reader` and `draft_reader` are open and verified; `draft_reader` is null
  // without a draft model. See also ModelSizes::Measure.
  static Result<std::unique_ptr<ModelInstance>> Create(
      const RuntimeConfig& config, std::unique_ptr<ModelReader> reader,
      std::unique_ptr<ModelReader> draft_reader, std::shared_ptr<Device> device,
      std::shared_ptr<CompletionSetImpl> engine_set);
  ~ModelInstance();

  const proto::DecoderSpec& spec() const { return model_.reader->spec(); }
  const ModelInfo& info() const { return model_.sizes.info; }
  ModelState state() const { return state_.load(); }

  Status Start();
  // A second stop joins a drain that is under way; a cancel cuts it short.
  Status Stop(StopMode mode, int64_t timeout_ms, const std::function<bool()>& cancelled = nullptr);
  // Initial | Stop -> Released: no Start succeeds any more.
  Status Release();
  // Running: gives the memory of the device back, and takes it again.
  Status UnloadMemory();
  Status LoadMemory();

  Result<StartedRequest> Submit(uint64_t request_id, std::span<const int64_t> prompt_ids,
                                const GenerationConfig& generation,
                                std::shared_ptr<TokenMask> token_mask,
                                const std::function<bool()>& cancelled);
  Status StopRequest(RequestHandle handle, FinishReason reason);
  Status ReleaseRequest(RequestHandle handle) { return mailbox_.Release(handle); }
  // Wait for some requests or for all to end.
  Status SyncRequests(std::span<const RequestHandle> handles, int64_t timeout_ms,
                      const std::function<bool()>& cancelled);
  Status SyncAll(int64_t timeout_ms, const std::function<bool()>& cancelled);

  // Returns a number of tokens; waits for the running step.
  Result<int64_t> CallPrefixCache(PrefixOp op, std::span<const int64_t> prompt_ids,
                                  const std::string& lora_name);
  // Packs the adapter on the caller's thread.
  Status LoadLora(const std::string& lora_name, const LoraFile& file);
  Status UnloadLora(const std::string& lora_name);
  const LoraRegistry& loras() const { return loras_; }

  EngineStat Stat() const;
  std::vector<Metric> Metrics() const { return MakeMetrics(Stat(), statistics_); }
  Status WriteTrace(const std::string& path) const;
  Result<std::string> OpProfilingInfo() const;

  // Called by the step thread around each step; set before Start. Tests only.
  void set_step_hook(StepHook hook) { hook_ = std::move(hook); }

 private:
  ModelInstance(const RuntimeConfig& config, std::unique_ptr<ModelReader> reader,
                std::unique_ptr<ModelReader> draft_reader, std::shared_ptr<Device> device,
                std::shared_ptr<CompletionSetImpl> engine_set);

  Result<std::unique_ptr<StepLoop>> MakeLoop();
  // The refusal of a call while a drain is under way.
  Status IsDraining(const char* call) const;
  Status JoinDrain(const Lifecycle::Call& call, StopMode mode, int64_t timeout_ms,
                   const std::function<bool()>& cancelled);
  void WriteLastTrace() const;
  // Fails unless the model runs and its memory is loaded or not, as `has_memory` says. For calls
  // that have entered the lifecycle.
  Status CheckMemory(const char* call, bool has_memory) const;

  InstalledModel model_;  // constant once Create has returned
  std::shared_ptr<CompletionSetImpl> engine_set_;
  LoraRegistry loras_;
  std::unique_ptr<StepTrace> trace_;       // null: none is kept
  std::unique_ptr<OpProfile> op_profile_;  // null: nothing is measured
  StepHook hook_;
  Statistics statistics_;

  Lifecycle lifecycle_;  // Start, Stop, Release and the calls on memory are its calls
  std::atomic<ModelState> state_{ModelState::kInitial};
  Mailbox mailbox_;
  std::unique_ptr<StepLoop> loop_;  // while Running
  std::thread step_thread_;
};

}  // namespace allspark
