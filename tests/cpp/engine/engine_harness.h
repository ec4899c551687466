// Helpers of the engine's tests: an engine with a small random model, requests, and hooks into its
// steps.
#pragma once

#define XXH_INLINE_ALL

#include <gtest/gtest.h>
#include <poll.h>
#include <xxhash.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "allspark/engine.h"
#include "engine/testing.h"
#include "support/blocked_thread.h"
#include "support/random_model.h"
#include "support/sim_device.h"

namespace allspark::testing {

#define ASSERT_OK(expr)                              \
  do {                                               \
    const ::allspark::Status status_ = (expr);       \
    ASSERT_TRUE(status_.ok()) << status_.ToString(); \
  } while (0)
#define EXPECT_OK(expr)                              \
  do {                                               \
    const ::allspark::Status status_ = (expr);       \
    EXPECT_TRUE(status_.ok()) << status_.ToString(); \
  } while (0)

// Engines of these tests run on the device that ALLSPARK_TEST_DEVICE names (support/sim_device.h).
inline const bool kOnSim = [] {
  if (TestsUseSim()) TestingAccess::DefaultDeviceMaker() = MakeTestDevice;
  return TestsUseSim();
}();

using Ids = std::vector<int64_t>;

// Whether a CompletionSet's fd() is.
inline bool Readable(int fd) {
  pollfd p{.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&p, 1, 0) == 1;
}

inline constexpr CacheMode kCacheModes[] = {CacheMode::kDefault, CacheMode::kQuantI8,
                                            CacheMode::kQuantU4, CacheMode::kQuantK8V4};
inline std::string CacheModeName(CacheMode mode) {
  const char* const names[] = {"Default", "Int8", "Uint4", "Int8Uint4"};
  return names[static_cast<int>(mode)];
}
// Names for tests over compute types and cache modes.
inline std::string ModeName(
    const ::testing::TestParamInfo<std::tuple<proto::ComputeType, CacheMode>>& test) {
  return std::string(std::get<0>(test.param) == proto::COMPUTE_FLOAT32 ? "Float32" : "BFloat16") +
         CacheModeName(std::get<1>(test.param));
}

inline RuntimeConfig SmallConfig(const std::string& name = "m") {
  RuntimeConfig config;
  config.model_name = name;
  config.engine_max_length = 256;
  config.engine_max_batch = 8;
  config.engine_max_prefill_length = 32;
  config.block_size = 16;
  config.num_threads = 2;
  return config;
}

inline GenerationConfig Greedy(int64_t max_new_tokens) {
  GenerationConfig config;
  config.do_sample = false;
  config.max_new_tokens = max_new_tokens;
  return config;
}

// Drawn from the whole vocabulary.
inline GenerationConfig Drawn(int64_t max_new_tokens, int64_t seed) {
  GenerationConfig config;
  config.max_new_tokens = max_new_tokens;
  config.temperature = 1.5;
  config.top_k = 0;
  config.seed = seed;
  return config;
}

inline Ids RandomPrompt(std::mt19937& rng, int64_t length, int64_t vocab_size) {
  Ids ids(static_cast<size_t>(length));
  for (int64_t& id : ids) id = static_cast<int64_t>(rng() % static_cast<uint64_t>(vocab_size));
  return ids;
}

// Blocks the step thread at the start of a step until opened.
class Gate {
 public:
  void Close() {
    std::lock_guard lock(mutex_);
    open_ = false;
  }
  void Open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  // Returns once the step thread stands at the closed gate.
  void WaitArrived() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return arrived_ > 0; });
  }
  void Pass() {
    std::unique_lock lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --arrived_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int arrived_ = 0;
};

// Runs a test's code on the step thread. By reference it is a StepHook; it must outlive the model's
// run.
class Hook {
 public:
  // Returns once no call of the earlier function is running.
  void Set(StepHook on_event) {
    std::lock_guard lock(mutex_);
    on_event_ = std::move(on_event);
  }
  // Closed before start_model, it holds the step thread back until all requests are submitted. The
  // scheduler's decisions then depend on the requests alone and not on when they came.
  Gate loop_gate;
  void operator()(const StepEvent& event) {
    if (event.phase == StepPhase::kLoopBegin) loop_gate.Pass();
    std::lock_guard lock(mutex_);
    if (on_event_) on_event_(event);
  }

 private:
  std::mutex mutex_;
  StepHook on_event_;
};

// Removes the hook's function before the locals that it refers to are destroyed; must be declared
// after them.
class HookGuard {
 public:
  explicit HookGuard(Hook& hook) : hook_(hook) {}
  ~HookGuard() { hook_.Set({}); }
  HookGuard(const HookGuard&) = delete;
  HookGuard& operator=(const HookGuard&) = delete;

 private:
  Hook& hook_;
};

// Of the row of an event of StepPhase::kLogits.
inline uint64_t LogitsDigest(const StepEvent& event) {
  const std::span<const float> logits = event.ReadLogits();
  return XXH3_64bits(logits.data(), logits.size_bytes());
}

// All tokens that a queue still gives. Requires: the request will end.
inline Ids ReadAll(ResultQueue& queue) {
  Ids ids;
  while (auto elements = queue.Get()) {
    ids.insert(ids.end(), elements->ids_from_generate.begin(), elements->ids_from_generate.end());
  }
  return ids;
}

class EngineTest : public ::testing::Test {
 protected:
  void Install(const RuntimeConfig& config, const proto::DecoderSpec& spec = TinyLlamaSpec(),
               uint64_t seed = 1) {
    vocab_size_ = spec.vocab_size();
    ASSERT_OK(engine_->RegisterImage(config.model_name, MakeRandomModel(spec, seed)));
    ASSERT_OK(engine_->InstallModel(config));
    ASSERT_OK(TestingAccess::SetStepHook(*engine_, config.model_name, std::ref(hook_)));
  }
  void InstallAndStart(const RuntimeConfig& config,
                       const proto::DecoderSpec& spec = TinyLlamaSpec(), uint64_t seed = 1) {
    Install(config, spec, seed);
    if (HasFatalFailure()) return;
    ASSERT_OK(engine_->StartModel(config.model_name));
  }
  StartedRequest Start(const Ids& prompt, const GenerationConfig& config,
                       const std::string& model = "m") {
    Result<StartedRequest> started = engine_->StartRequest(model, prompt, config);
    EXPECT_TRUE(started.ok()) << started.status().ToString();
    return started.ok() ? *started : StartedRequest{};
  }
  Ids Run(const Ids& prompt, const GenerationConfig& config, const std::string& model = "m") {
    const StartedRequest request = Start(prompt, config, model);
    const Ids ids = ReadAll(*request.queue);
    EXPECT_OK(engine_->ReleaseRequest(model, request.handle));
    return ids;
  }
  // Blocks all steps at `gate_` from now on; call before any request.
  void GateSteps() {
    hook_.Set([this](const StepEvent& event) {
      if (event.phase == StepPhase::kBegin) gate_.Pass();
    });
  }
  // Opens `gate_` on another thread once this one waits in a call to the engine: then the step that
  // stands at the gate is the last one before the engine sees the call.
  std::thread OpenOnceBlocked() {
    return std::thread([this, caller = ThisThread()] {
      AwaitBlocked(caller);
      gate_.Open();
    });
  }
  // Calls start(), and unloads the model while the step thread is in the `at`-th step after it.
  template <class StartRequests>
  auto UnloadInStep(int64_t at, const StartRequests& start) {
    int64_t steps = 0;
    gate_.Close();
    hook_.Set([&](const StepEvent& event) {
      if (event.phase == StepPhase::kBegin && ++steps == at) gate_.Pass();
    });
    const HookGuard guard(hook_);
    auto started = start();
    gate_.WaitArrived();
    std::thread opener = OpenOnceBlocked();
    EXPECT_OK(engine_->UnloadDeviceMemory("m"));
    opener.join();
    return started;
  }

  Hook hook_;
  Gate gate_;
  int64_t vocab_size_ = 0;
  std::mt19937 rng_{7};
  std::unique_ptr<Engine> engine_ = std::make_unique<Engine>();
};

}  // namespace allspark::testing
