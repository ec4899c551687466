// After warm-up a step allocates nothing: not on the step thread's heap, not on the device.

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "cpp/engine/engine_harness.h"
#include "cpp/engine/fake_device.h"
#include "cpp/engine/function_mask.h"
#include "support/alloc_counter.h"
#include "support/random_lora.h"

namespace allspark::testing {
namespace {

// Beams or samples, with all that they hand on or keep.
GenerationConfig RankedConfig(int i) {
  GenerationConfig config;
  config.max_new_tokens = 20 + i;
  if (i % 8 == 2) {
    config.do_sample = false;
    config.num_beams = 2 + i % 3;
  } else {
    config.best_of = 3;
    config.prompt_lookup_num_tokens = 6;
  }
  config.num_return_sequences = 2;
  config.repetition_penalty = 1.2;
  config.no_repeat_ngram_size = 4;
  config.logprobs = true;
  config.top_logprobs = 5;
  config.stop_words_ids = {{1, 2}, {4}};
  return config;
}

// Words of which some begin within others.
std::vector<std::vector<int64_t>> OverlappingWords() {
  std::vector<std::vector<int64_t>> words = {{5}, {6, 7}};
  for (int64_t i = 0; i < 1000; ++i) words.push_back({7, i % 10, i / 10 % 10, i / 100, 7});
  return words;
}

// Makes masks that come later than their steps, from a thread. To ask for one allocates nothing.
class LateMasks {
 public:
  explicit LateMasks(const std::atomic<int64_t>& steps)
      : steps_(steps), thread_([this] { Run(); }) {}
  ~LateMasks() {
    ends_ = true;
    thread_.join();
  }
  LateMasks(const LateMasks&) = delete;
  LateMasks& operator=(const LateMasks&) = delete;

  std::shared_ptr<TokenMask> Make() {
    std::lock_guard lock(mutex_);
    Asked& asked = asked_.emplace_back();
    asked.mask = std::make_shared<FunctionMask>([&asked, this](FunctionMask&, int32_t token) {
      asked.step = steps_.load();
      asked.token = token;
    });
    return asked.mask;
  }
  // Masks that a step began without.
  int64_t num_late() const { return num_late_; }

 private:
  static constexpr int32_t kNothing = std::numeric_limits<int32_t>::min();
  struct Asked {
    std::shared_ptr<FunctionMask> mask;
    std::atomic<int64_t> step{0};
    std::atomic<int32_t> token{kNothing};  // written last
  };

  void Run() {
    while (!ends_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::lock_guard lock(mutex_);
      for (Asked& asked : asked_) Answer(asked);
    }
  }
  void Answer(Asked& asked) {
    const int32_t token = asked.token;
    if (token == kNothing) return;
    // Where all others wait too, no step begins.
    const bool is_late = steps_ > asked.step;
    if (!is_late && ++num_polls_ % 8 != 0) return;
    num_late_ += is_late;
    asked.token = kNothing;
    asked.mask->PublishEvery(3, token + 1);
  }

  const std::atomic<int64_t>& steps_;
  std::mutex mutex_;         // guards `asked_`
  std::deque<Asked> asked_;  // addresses are stable
  std::atomic<int64_t> num_late_{0};
  int64_t num_polls_ = 0;
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

// With requests that are preempted, or interrupted.
class AllocationTest : public EngineTest,
                       public ::testing::WithParamInterface<std::tuple<CacheMode, bool>> {};

TEST_P(AllocationTest, AStepAllocatesNothing) {
  // A pool small enough for preemption, prompts of several chunks, stops in between, adapters, a
  // tier on the host: every path of a step.
  RuntimeConfig config = SmallConfig();
  config.num_blocks = 16;
  config.cache_mode = std::get<0>(GetParam());
  const bool interrupts = std::get<1>(GetParam());
  config.interrupt_on_cache_exhaustion = interrupts;
  config.draft_model = "draft";
  config.trace_path = ::testing::TempDir() + "/allocation_trace.json";
  config.op_profiling = true;
  proto::DecoderSpec deep = TinyLlamaSpec();
  deep.set_num_layers(24);
  ASSERT_OK(engine_->RegisterImage("draft", MakeRandomModel(TinyLlamaSpec(), 1)));
  const auto link = std::make_shared<testing::HostLink>();
  const CacheRatio cache_ratio("0.001");
  testing::UseFakeDevice(*engine_, link);
  Install(config, deep);
  for (const char* name : {"a", "b"}) {
    const auto image = RandomLora(static_cast<uint64_t>(name[0])).AddAll(deep, 4).ToImage();
    ASSERT_OK(engine_->LoadLora("m", name, image));
  }
  AllocationCounter counter;
  std::atomic<int64_t> steps{0};
  LateMasks late_masks(steps);
  bool counting = false;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    // From the first begin on, the step thread counts for ever: between steps too.
    if (event.phase == StepPhase::kBegin) {
      ++steps;
      if (!counting) counter.Start();
      counting = true;
    }
  });
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  const AllocatorStats before = TestingAccess::DeviceStats(*engine_);
  std::vector<StartedRequest> requests;
  for (int i = 0; i < 40; ++i) {
    GenerationConfig generation = Greedy(60 + i);
    if (i % 3 == 0) {
      generation.do_sample = true;
      generation.seed = i;
      generation.top_p = 0.9;
      generation.stop_words_ids = OverlappingWords();
      generation.stop_words_ids.push_back({4});
      generation.min_new_tokens = 30;
    }
    if (i % 2 == 1) generation.prompt_lookup_num_tokens = 6;
    if (i % 5 == 1) generation.output_logits = OutputRows::kAll;
    if (i % 5 == 2) generation.enable_tensors_from_model_inference = true;
    if (i % 5 == 3) generation.pooling = i % 2 == 0 ? Pooling::kMean : Pooling::kLast;
    generation.prompt_only = i % 10 == 3;
    if (i % 7 == 1) generation.use_draft_model = false;
    if (i % 6 == 2) generation.timeout_ms = i % 4 == 0 ? 1 : 1000000;
    if (i % 4 == 1) {
      generation.repetition_penalty = 1.3;
      generation.frequency_penalty = 0.2;
      generation.presence_penalty = -0.1;
      generation.no_repeat_ngram_size = 3;
      generation.repetition_ngram_size = 4;
      generation.repetition_ngram_threshold = 3;
      generation.bad_words_ids = OverlappingWords();
      generation.logit_bias = {{8, 1.5}};
      generation.min_new_tokens = 3;
      generation.stop_token_ids = {9};
      generation.min_p = 0.01;
      generation.logprobs = true;
      generation.top_logprobs = 20;
      generation.prompt_logprobs = true;
      generation.logprobs_mode = i % 8 == 1 ? LogprobsMode::kRaw : LogprobsMode::kProcessed;
    }
    if (i % 4 == 2) generation = RankedConfig(i);
    if (i % 3 != 1) generation.lora_name = i % 3 == 0 ? "a" : "b";
    // Some repeat themselves, so that there is something to draft.
    Ids prompt = RandomPrompt(rng_, 1 + (i * 13) % 150, i % 4 == 3 ? 3 : vocab_size_);
    // And some begin alike, so that there is something to find in the prefix cache.
    if (i % 4 == 2) std::fill_n(prompt.begin(), prompt.size() * 3 / 4, 7);
    std::shared_ptr<TokenMask> mask;
    if (i % 4 == 0) mask = i % 8 == 0 ? ThirdsMask() : late_masks.Make();
    requests.push_back(*engine_->StartRequest("m", prompt, generation, std::move(mask)));
    if (i % 5 == 4) {
      EXPECT_OK(engine_->StopRequest("m", requests[static_cast<size_t>(i) - 2].handle));
    }
  }
  hook_.loop_gate.Open();
  ASSERT_OK(engine_->SyncAllRequests("m"));
  EXPECT_EQ(engine_->GetEngineStat("m")->num_preemptions > 0, !interrupts);
  const auto is_interrupted = [](const StartedRequest& request) {
    return request.queue->finish_reason() == FinishReason::kInterrupted;
  };
  EXPECT_EQ(std::any_of(requests.begin(), requests.end(), is_interrupted), interrupts);
  EXPECT_GT(engine_->GetEngineStat("m")->total_draft_token, 0);
  EXPECT_GT(engine_->GetEngineStat("m")->prefix_cache_hit_token, 0);
  EXPECT_GT(steps, 40);
  EXPECT_GT(link->num_out, 0);
  EXPECT_GT(late_masks.num_late(), 0);
  EXPECT_EQ(counter.count(), 0) << counter.bytes() << " bytes on the step thread's heap";
  EXPECT_EQ(TestingAccess::DeviceStats(*engine_).num_allocs, before.num_allocs);
  // Stops counting on the thread that began it.
  hook_.Set([&](const StepEvent& event) {
    if (event.phase == StepPhase::kBegin && counting) {
      counter.Stop();
      counting = false;
    }
  });
  Run({1}, Greedy(1));
}

INSTANTIATE_TEST_SUITE_P(Exhaustion, AllocationTest,
                         ::testing::Combine(::testing::ValuesIn(kCacheModes), ::testing::Bool()),
                         [](const ::testing::TestParamInfo<std::tuple<CacheMode, bool>>& test) {
                           return CacheModeName(std::get<0>(test.param)) +
                                  (std::get<1>(test.param) ? "Interrupts" : "Preempts");
                         });

TEST_F(EngineTest, AnIdleEngineUsesNoCpu) {
  InstallAndStart(SmallConfig());
  Run({1, 2, 3}, Greedy(10));
  const auto cpu_us = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * int64_t{1000000} +
           usage.ru_utime.tv_usec + usage.ru_stime.tv_usec;
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // workers go to sleep
  const int64_t before = cpu_us();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  // One spinning thread would take 500,000; the bound leaves room for a timer tick.
  EXPECT_LT(cpu_us() - before, 50000);
}

}  // namespace
}  // namespace allspark::testing
