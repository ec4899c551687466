// The prefix cache's host tier, on a fake device with memory of its own: blocks that the device's
// pool evicted come back from the host with the same bits.
#include <atomic>

#include "cpp/engine/engine_harness.h"
#include "cpp/engine/fake_device.h"
#include "cpp/engine/function_mask.h"

namespace allspark {
namespace {

using testing::CacheRatio;
using testing::EngineTest;
using testing::FunctionMask;
using testing::Greedy;
using testing::HookGuard;
using testing::HostLink;
using testing::Ids;
using testing::RandomPrompt;
using testing::ReadAll;
using testing::SmallConfig;

class HostTierTest : public EngineTest {
 protected:
  // 16 blocks on the device: enough for one request of engine_max_length.
  void StartOnDevice(const char* ratio) {
    const CacheRatio cache_ratio(ratio);
    UseFakeDevice(*engine_, link_);
    RuntimeConfig config = SmallConfig();
    config.num_blocks = 16;
    InstallAndStart(config);
  }
  struct Outcome {
    Ids ids;
    int64_t cached = 0, on_gpu = 0, on_cpu = 0;
  };
  Outcome RunAndLook(const Ids& prompt) {
    const StartedRequest request = Start(prompt, Greedy(4));
    Outcome outcome;
    while (auto elements = request.queue->Get()) {
      outcome.ids.insert(outcome.ids.end(), elements->ids_from_generate.begin(),
                         elements->ids_from_generate.end());
      outcome.cached = elements->prefix_cache_len;
      outcome.on_gpu = elements->prefix_len_gpu;
      outcome.on_cpu = elements->prefix_len_cpu;
    }
    return outcome;
  }

  std::shared_ptr<HostLink> link_ = std::make_shared<HostLink>();
};

TEST_F(HostTierTest, BlocksComeBackFromTheHost) {
  StartOnDevice("0.01");
  std::vector<Ids> prompts;
  std::vector<Outcome> first;
  for (int i = 0; i < 4; ++i) {
    prompts.push_back(RandomPrompt(rng_, 120, vocab_size_));
    first.push_back(RunAndLook(prompts.back()));
    EXPECT_EQ(first.back().cached, 0);
  }
  EXPECT_GT(link_->num_out, 0);
  EXPECT_EQ(link_->num_in, 0);
  // All four need 28 blocks: the first ones are no longer on the device.
  EXPECT_EQ(*engine_->FindPrefix("m", prompts[0]), 112);
  const Outcome again = RunAndLook(prompts[0]);
  EXPECT_EQ(again.ids, first[0].ids);
  EXPECT_EQ(again.cached, 112);
  EXPECT_EQ(again.on_cpu, 112);
  EXPECT_EQ(again.on_gpu, 0);
  EXPECT_EQ(link_->num_in, 7);
  const Outcome third = RunAndLook(prompts[0]);
  EXPECT_EQ(third.ids, first[0].ids);
  EXPECT_EQ(third.on_gpu, 112);
  EXPECT_EQ(third.on_cpu, 0);
  EXPECT_EQ(engine_->GetEngineStat("m")->prefix_cache_hit_token, 224);
  EXPECT_EQ(*engine_->ClearPrefixCache("m") > 0, true);
  EXPECT_EQ(*engine_->FindPrefix("m", prompts[1]), 0);
  EXPECT_EQ(RunAndLook(prompts[1]).ids, first[1].ids);
}

TEST_F(HostTierTest, ALateMaskCountsNoTokenTwice) {
  StartOnDevice("0.01");
  std::vector<Ids> prompts;
  for (int i = 0; i < 4; ++i) {
    prompts.push_back(RandomPrompt(rng_, 120, vocab_size_));
    RunAndLook(prompts.back());
  }
  std::atomic<FunctionMask*> late{nullptr};
  const auto mask = std::make_shared<FunctionMask>([&](FunctionMask& own, int32_t) {
    if (late == nullptr) {
      late = &own;
    } else {
      own.PublishEvery(1);
    }
  });
  int64_t steps = 0;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    if (event.phase != StepPhase::kBegin) return;
    gate_.Pass();
    if (late != nullptr && ++steps == 5) late.load()->PublishEvery(1);
  });
  gate_.Close();
  const StartedRequest other = Start(RandomPrompt(rng_, 20, vocab_size_), Greedy(60));
  gate_.WaitArrived();
  const StartedRequest request = *engine_->StartRequest("m", prompts[0], Greedy(4), mask);
  gate_.Open();
  int64_t cached = 0, on_gpu = 0, on_cpu = 0;
  while (const auto elements = request.queue->Get()) {
    cached = elements->prefix_cache_len;
    on_gpu = elements->prefix_len_gpu;
    on_cpu = elements->prefix_len_cpu;
  }
  EXPECT_EQ(request.queue->GeneratedLength(), 4) << request.queue->error();
  EXPECT_EQ(cached, 112);
  EXPECT_EQ(on_cpu, 112);
  EXPECT_EQ(on_gpu, 0);
}

// Compares requests that preempt each other and find their blocks on the host with the same
// requests alone.
TEST_F(HostTierTest, ACrowdGivesWhatEachGivesAlone) {
  StartOnDevice("0.01");
  TestingAccess::SetDeviceMaker(*engine_, nullptr);
  InstallAndStart(SmallConfig("plain"));
  std::vector<Ids> prompts;
  for (int i = 0; i < 24; ++i) {
    prompts.push_back(RandomPrompt(rng_, 20 + static_cast<int64_t>(rng_() % 100), vocab_size_));
    if (i % 3 == 2) prompts.back() = prompts[static_cast<size_t>(i - 2)];
  }
  std::vector<StartedRequest> started;
  for (const Ids& prompt : prompts) started.push_back(Start(prompt, Greedy(60)));
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(ReadAll(*started[i].queue), Run(prompts[i], Greedy(60), "plain")) << "request " << i;
  }
  EXPECT_GT(link_->num_in, 0);
}

// The first steps of a long prompt move blocks to the host and ask for no result, so the copies may
// still be on their way when the memory that they go to is given back.
TEST_F(HostTierTest, AnUnloadWaitsForTheCopies) {
  StartOnDevice("0.01");
  const Ids prompt = RandomPrompt(rng_, 200, vocab_size_);
  const Ids expected = RunAndLook(prompt).ids;
  for (const int64_t at : {1, 2, 3}) {
    for (int i = 0; i < 2; ++i) RunAndLook(RandomPrompt(rng_, 120, vocab_size_));
    const StartedRequest request = UnloadInStep(at, [&] { return Start(prompt, Greedy(4)); });
    EXPECT_EQ(link_->num_unfinished, 0) << "of " << link_->num_out;
    EXPECT_OK(engine_->LoadDeviceMemory("m"));
    EXPECT_EQ(ReadAll(*request.queue), expected) << "unloaded in step " << at;
  }
  EXPECT_GT(link_->num_out, 0);
  ASSERT_OK(engine_->StopModel("m"));
  EXPECT_EQ(link_->num_unfinished, 0);
}

TEST_F(HostTierTest, AFailedCopyEndsTheRequestsAndTheEngineGoesOn) {
  StartOnDevice("0.01");
  const Ids prompt = RandomPrompt(rng_, 120, vocab_size_);
  const Outcome first = RunAndLook(prompt);
  for (int i = 0; i < 4; ++i) RunAndLook(RandomPrompt(rng_, 120, vocab_size_));
  link_->fails = true;
  const StartedRequest request = Start(prompt, Greedy(4));
  EXPECT_TRUE(ReadAll(*request.queue).empty());
  EXPECT_EQ(request.queue->GenerateStatus(), GenerateRequestStatus::kInternalError);
  EXPECT_NE(request.queue->error().find("the link is down"), std::string::npos);
  link_->fails = false;
  const Outcome again = RunAndLook(prompt);
  EXPECT_EQ(again.ids, first.ids);
  EXPECT_EQ(again.cached, 0) << "nothing that was there is trusted";
}

TEST_F(HostTierTest, WithoutARatioThereIsNone) {
  StartOnDevice("0");
  const Ids prompt = RandomPrompt(rng_, 120, vocab_size_);
  RunAndLook(prompt);
  for (int i = 0; i < 4; ++i) RunAndLook(RandomPrompt(rng_, 120, vocab_size_));
  EXPECT_EQ(link_->num_out, 0);
  EXPECT_EQ(RunAndLook(prompt).cached, 0);
}

TEST_F(HostTierTest, ABadRatioIsRefused) {
  const CacheRatio cache_ratio("1.5");
  ASSERT_OK(engine_->RegisterImage("m", testing::MakeRandomModel(testing::TinyLlamaSpec(), 1)));
  const Status status = engine_->InstallModel(SmallConfig());
  EXPECT_NE(status.message().find("CPU_CACHE_RATIO is \"1.5\"; it must be a number from 0 to 1"),
            std::string::npos)
      << status.ToString();
}

}  // namespace
}  // namespace allspark
