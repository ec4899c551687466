// The life of an engine in which allocations fail: a call that fails for lack of memory is made
// again, and the requests must give the same output as without faults.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpp/engine/engine_harness.h"
#include "cpp/engine/function_mask.h"
#include "memory/bfc_allocator.h"
#include "support/alloc_counter.h"
#include "support/fault_allocator.h"
#include "support/random_lora.h"

namespace allspark::testing {

// The models that all lives share: made once, without faults.
struct FaultModels {
  std::shared_ptr<const ModelImage> model = MakeRandomModel(TinyQwen2Spec(), 5);
  std::shared_ptr<const ModelImage> draft = MakeRandomModel(TinyLlamaSpec(), 6);
  std::shared_ptr<const LoraImage> lora = RandomLora(7).AddAll(TinyQwen2Spec(), 4).ToImage();
};

class FaultLife {
 public:
  // The requests' outputs, in the order of the calls: tokens, and tensor values by name.
  using Outcome = std::vector<std::pair<Ids, std::map<std::string, std::vector<float>>>>;

  // `heap`: faults for this thread's calls to the engine, not for the test's own allocations; null:
  // none.
  FaultLife(const FaultModels& models, Allocator* allocator, HeapFaults* heap)
      : models_(models), allocator_(allocator), heap_(heap) {}

  // The faults for the step thread's allocations.
  HeapFaults* step_heap = nullptr;
  // Called after each failure.
  std::function<void()> on_failure;

  int64_t num_failures() const { return num_failures_; }
  const Outcome& outcome() const { return outcome_; }
  // The last call that failed.
  const std::string& failed() const { return failed_; }

 private:
  static RuntimeConfig Config(int64_t num_threads) {
    RuntimeConfig config = SmallConfig();
    config.engine_max_length = 64;
    config.num_blocks = 16;
    config.num_threads = num_threads;
    config.draft_model = "draft";
    config.op_profiling = true;
    return config;
  }

  // Repeats a call until it succeeds. Expects that it fails only for lack of memory, and that a
  // failed call leaves nothing behind.
  template <typename Call>
    requires std::is_same_v<std::invoke_result_t<Call>, Status>
  void Must(const char* what, Call call) {
    while (true) {
      const int64_t device_bytes = DeviceBytes();
      const Status status = Try(what, call);
      if (status.ok()) return;
      ExpectNoMemory(what, status, device_bytes);
    }
  }
  template <typename Call>
  auto Must(const char* what, Call call) {
    while (true) {
      const int64_t device_bytes = DeviceBytes();
      auto result = Try(what, call);
      if (result.ok()) return std::move(*result);
      ExpectNoMemory(what, result.status(), device_bytes);
    }
  }

  // For calls that release something: they must succeed without memory.
  template <typename Call>
  void NeedsNone(const char* what, Call call) {
    const Status status = Try(what, call);
    EXPECT_TRUE(status.ok()) << what << ": " << status.ToString();
  }

  // As Must, for calls that return no status: they throw bad_alloc.
  template <typename Call>
  std::invoke_result_t<Call> MayThrow(const char* what, Call call) {
    while (true) {
      try {
        const HeapFaults::Scope scope(heap_);
        return call();
      } catch (const std::bad_alloc&) {
        NoteFailure(what);
      }
    }
  }

  template <typename Call>
  std::invoke_result_t<Call> Try(const char* what, Call call) {
    try {
      const HeapFaults::Scope scope(heap_);
      return call();
    } catch (const std::exception& error) {
      ADD_FAILURE() << what << " threw " << error.what();
    }
    return Status::ResourceExhausted("thrown");
  }

  void ExpectNoMemory(const char* what, const Status& status, int64_t device_bytes) {
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << what << ": " << status.ToString();
    EXPECT_EQ(status.as_status(), AsStatus::kMemoryError) << what;
    EXPECT_FALSE(status.message().empty()) << what;
    EXPECT_EQ(DeviceBytes(), device_bytes) << what << " has left something on the device";
    NoteFailure(what);
  }

  int64_t DeviceBytes() const {
    return allocator_ != nullptr ? allocator_->Stats().bytes_in_use : 0;
  }

  void NoteFailure(const char* what) {
    failed_ = what;
    if (on_failure) on_failure();
    if (++num_failures_ > kMostFailures) throw std::runtime_error(failed_ + " still fails");
  }

  void OnStep(const StepEvent& event) const {
    if (event.phase == StepPhase::kLoopBegin && step_heap != nullptr) step_heap->Enter();
  }

  void Load() {
    Must("register", [&] { return engine_->RegisterImage("m", models_.model); });
    Must("register", [&] { return engine_->RegisterImage("draft", models_.draft); });
    const RuntimeConfig config = Config(1);
    Must("install_model", [&] { return engine_->InstallModel(config); });
    const auto hook = [this](const StepEvent& event) { OnStep(event); };
    ASSERT_OK(TestingAccess::SetStepHook(*engine_, "m", hook));
    Must("load_lora", [&] { return engine_->LoadLora("m", "a", models_.lora); });
    Must("start_model", [&] { return engine_->StartModel("m"); });
  }

  // One request of each kind, one after the other, so that each kind's allocations are separate.
  void Serve() {
    Ask("greedy", Greedy(3));
    GenerationConfig sampled;
    sampled.seed = 3;
    sampled.max_new_tokens = 3;
    sampled.logprobs = sampled.prompt_logprobs = true;
    sampled.top_logprobs = 2;
    sampled.repetition_penalty = 1.2;
    sampled.stop_words_ids = {{1, 2}, {3}};
    sampled.bad_words_ids = {{4, 5}};
    sampled.logit_bias = {{6, 1}};
    sampled.lora_name = "a";
    sampled.timeout_ms = 1000000;
    Ask("sampled", sampled);
    GenerationConfig beams = Greedy(3);
    beams.num_beams = beams.num_return_sequences = 2;
    beams.logprobs = true;
    Ask("beams", beams);
    GenerationConfig best;
    best.seed = 4;
    best.max_new_tokens = 3;
    best.best_of = 3;
    best.num_return_sequences = 2;
    Ask("best_of", best);
    GenerationConfig tensors = Greedy(3);
    tensors.enable_tensors_from_model_inference = true;
    tensors.pooling = Pooling::kMean;
    Ask("tensors", tensors);
    GenerationConfig embedding = Greedy(3);
    embedding.prompt_only = true;
    embedding.pooling = Pooling::kLast;
    Ask("embedding", embedding);
    Ask("guided", Greedy(3), [] { return ThirdsMask(); });
  }

  // Starts a request, reads it to its end, releases it.
  void Ask(const char* what, const GenerationConfig& config,
           std::function<std::shared_ptr<TokenMask>()> make_mask = {}) {
    const StartedRequest started = Must(what, [&] {
      // A mask serves one request only; the test makes it without faults.
      const auto mask = [&]() -> std::shared_ptr<TokenMask> {
        const HeapFaults::Scope no_faults(nullptr);
        return make_mask ? make_mask() : nullptr;
      }();
      return engine_->StartRequest("m", kPrompt, config, mask);
    });
    Read(what, *started.queue);
    for (const StartedRequest& next : started.next_best) Read(what, *next.queue);
    const RequestHandle handle = started.handle;
    NeedsNone("sync_request", [&] { return engine_->SyncRequest("m", handle, -1); });
    NeedsNone("stop_request", [&] { return engine_->StopRequest("m", handle); });
    NeedsNone("release_request", [&] { return engine_->ReleaseRequest("m", handle); });
    for (const StartedRequest& next : started.next_best) {
      NeedsNone("release_request", [&] { return engine_->ReleaseRequest("m", next.handle); });
    }
  }

  void Read(const char* what, ResultQueue& queue) {
    auto& [ids, values] = outcome_.emplace_back();
    while (true) {
      const auto elements = MayThrow(what, [&] { return queue.Get(); });
      if (!elements) break;
      ids.insert(ids.end(), elements->ids_from_generate.begin(), elements->ids_from_generate.end());
      const auto keep = [&kept_by_name = values](const std::string& name,
                                                 std::span<const float> added) {
        std::vector<float>& kept = kept_by_name[name];
        kept.insert(kept.end(), added.begin(), added.end());
      };
      keep("logprobs", elements->token_logprobs_list);
      keep("prompt logprobs", elements->prompt_token_logprobs_list);
      for (const auto& tensors : elements->tensors_from_model_inference) {
        for (const auto& [name, tensor] : tensors) {
          int64_t size = 1;
          for (int64_t extent : tensor.shape) size *= extent;
          keep(name, {tensor.data.get(), static_cast<size_t>(size)});
        }
      }
    }
    MayThrow("RequestStatInfo", [&] { return queue.RequestStatInfo(); });
    EXPECT_TRUE(IsOutput(queue.finish_reason())) << what << ": " << queue.error();
  }
  static bool IsOutput(FinishReason reason) {
    return reason == FinishReason::kStop || reason == FinishReason::kLength;
  }

  void Observe() {
    Must("pin_prefix", [&] { return engine_->PinPrefix("m", kPrompt, "a"); });
    EXPECT_EQ(Must("find_prefix", [&] { return engine_->FindPrefix("m", kPrompt, "a"); }), 16);
    Must("unpin_prefix", [&] { return engine_->UnpinPrefix("m", kPrompt, "a"); });
    Must("clear_prefix_cache", [&] { return engine_->ClearPrefixCache("m"); });
    Must("get_model_info", [&] { return engine_->GetModelInfo("m"); });
    Must("get_model_spec", [&] { return engine_->GetModelSpec("m"); });
    Must("get_model_state", [&] { return engine_->GetModelState("m"); });
    Must("get_engine_stat", [&] { return engine_->GetEngineStat("m"); });
    Must("get_op_profiling_info", [&] { return engine_->GetOpProfilingInfo("m"); });
    EXPECT_EQ(Must("list_loras", [&] { return engine_->ListLoras("m"); }),
              std::vector<std::string>{"a"});
    EXPECT_FALSE(MayThrow("GetMetrics", [&] { return engine_->GetMetrics(); }).empty());
    EXPECT_EQ(MayThrow("ListModels", [&] { return engine_->ListModels(); }),
              std::vector<std::string>{"m"});
    // Completions that nobody has read yet: a failed drain loses none of them.
    const auto set = MayThrow("CompletionSet", [] { return CompletionSet::Create(); });
    std::vector<std::shared_ptr<ResultQueue>> queues;
    for (int i = 0; i < 5; ++i) {
      const auto started =
          Must("start_request", [&] { return engine_->StartRequest("m", kPrompt, Greedy(3)); });
      MayThrow("Attach", [&] { set->Attach(started.queue); });
      queues.push_back(started.queue);
    }
    Must("sync_all_requests", [&] { return engine_->SyncAllRequests("m", -1); });
    EXPECT_EQ(MayThrow("Drain", [&] { return set->Drain(); }).size(), queues.size());
    EXPECT_GE(MayThrow("Drain", [&] { return engine_->completions()->Drain(); }).size(),
              queues.size());
  }

  void UnloadAndLoad() {
    Must("unload_device_mem", [&] { return engine_->UnloadDeviceMemory("m"); });
    Must("load_device_mem", [&] { return engine_->LoadDeviceMemory("m"); });
    Ask("after loading", Greedy(3));
    NeedsNone("unload_lora", [&] { return engine_->UnloadLora("m", "a"); });
  }

  void Stop() {
    NeedsNone("stop_model", [&] { return engine_->StopModel("m", StopMode::kDrain); });
    NeedsNone("release_model", [&] { return engine_->ReleaseModel("m"); });
    const int64_t num_live = allocator_ != nullptr ? allocator_->Stats().num_live : 0;
    EXPECT_EQ(num_live, 0);
  }

  void StartAgain() {
    const RuntimeConfig config = Config(2);
    Must("install_model", [&] { return engine_->InstallModel(config); });
    Must("start_model", [&] { return engine_->StartModel("m"); });
    Ask("the next request", Greedy(3));
    const auto start = [&] { return engine_->StartRequest("m", kPrompt, Greedy(40)); };
    last_ = Must("start_request", start).queue;
  }

 public:
  // From the engine's construction to its end.
  void Live() {
    MayThrow("Engine()", [&] { engine_ = std::make_unique<Engine>(); });
    if (allocator_ != nullptr) {
      // The allocator outlives the engine.
      TestingAccess::SetAllocator(*engine_, {std::shared_ptr<void>(), allocator_});
    }
    Load();
    Serve();
    Observe();
    UnloadAndLoad();
    Stop();
    StartAgain();
    // Destroys the engine with a running model and an unfinished request.
    {
      const HeapFaults::Scope scope(heap_);
      engine_.reset();
    }
    EXPECT_TRUE(IsTerminal(last_->GenerateStatus()));
  }

 private:
  static constexpr int64_t kMostFailures = 20;
  // One full block and one more token.
  static inline const Ids kPrompt = {5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21};

  const FaultModels& models_;
  Allocator* const allocator_;
  HeapFaults* const heap_;
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<ResultQueue> last_;
  Outcome outcome_;
  int64_t num_failures_ = 0;
  std::string failed_;
};

}  // namespace allspark::testing
