// Adapters in the engine: loading and unloading while requests run, limits and statuses. A
// request's output depends on its own adapter alone, under any load.
#include <algorithm>

#include "cpp/engine/engine_harness.h"
#include "support/random_lora.h"

namespace allspark {
namespace {

using testing::EngineTest;
using testing::Gate;
using testing::Greedy;
using testing::HookGuard;
using testing::Ids;
using testing::RandomLora;
using testing::RandomPrompt;
using testing::ReadAll;
using testing::SmallConfig;

class LoraTest : public EngineTest {
 protected:
  RuntimeConfig LoraConfig() {
    RuntimeConfig config = SmallConfig();
    config.lora_max_num = 3;
    config.lora_max_rank = 16;
    return config;
  }
  Status Load(const std::string& name, uint64_t seed, int64_t rank = 8) {
    return engine_->LoadLora("m", name,
                             RandomLora(seed).AddAll(testing::TinyLlamaSpec(), rank).ToImage());
  }
  GenerationConfig With(const std::string& lora, GenerationConfig config = Greedy(12)) {
    config.lora_name = lora;
    return config;
  }
};

TEST_F(LoraTest, LimitsAndStatuses) {
  Install(LoraConfig());
  const auto expect = [](const Status& status, AsStatus as_status, const std::string& part) {
    EXPECT_EQ(status.as_status(), as_status) << status.ToString();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.ToString();
  };
  // Loads work before the model runs, and while it runs.
  ASSERT_OK(Load("b", 1));
  ASSERT_OK(engine_->StartModel("m"));
  ASSERT_OK(Load("a", 2));
  EXPECT_EQ(*engine_->ListLoras("m"), (std::vector<std::string>{"a", "b"}));
  expect(Load("a", 3), AsStatus::kLoraAlreadyLoaded, "'a', which is loaded already");
  expect(Load("", 3), AsStatus::kParamError, "lora_name is empty");
  expect(Load("c", 3, 17), AsStatus::kLoraRankExceedLimitError, "rank 17; lora_max_rank is 16");
  ASSERT_OK(Load("c", 3, 16));
  expect(Load("d", 4), AsStatus::kLoraNumExceedLimitError,
         "3 adapters are loaded; lora_max_num is 3");
  expect(engine_->UnloadLora("m", "d"), AsStatus::kLoraNotFound, "loaded are 'a', 'b', 'c'");
  expect(engine_->StartRequest("m", Ids{1, 2}, With("d")).status(), AsStatus::kLoraNotFound, "'d'");
  ASSERT_OK(engine_->UnloadLora("m", "c"));
  ASSERT_OK(Load("d", 4));
  // Adapters stay loaded after a stop; a release of the model removes them.
  ASSERT_OK(engine_->StopModel("m"));
  EXPECT_EQ(engine_->ListLoras("m")->size(), 3u);
  ASSERT_OK(engine_->ReleaseModel("m"));
  EXPECT_FALSE(engine_->ListLoras("m").ok());
  EXPECT_EQ(TestingAccess::DeviceStats(*engine_).bytes_in_use, 0);
}

TEST_F(LoraTest, IsNotUnloadedWhileARequestUsesIt) {
  InstallAndStart(LoraConfig());
  ASSERT_OK(Load("a", 1));
  GateSteps();
  const HookGuard guard(hook_);
  gate_.Close();
  const StartedRequest request = Start({1, 2, 3}, With("a"));
  gate_.WaitArrived();
  const Status in_use = engine_->UnloadLora("m", "a");
  EXPECT_EQ(in_use.as_status(), AsStatus::kLoraInUse);
  EXPECT_NE(in_use.message().find("1 requests use"), std::string::npos) << in_use.ToString();
  gate_.Open();
  (void)ReadAll(*request.queue);
  // The end of the request frees the adapter, not the request's release.
  EXPECT_OK(engine_->UnloadLora("m", "a"));
}

TEST_F(LoraTest, AnUnloadUndoesThePinsOfItsPrefixes) {
  InstallAndStart(LoraConfig());
  const Ids prompt = RandomPrompt(rng_, 40, vocab_size_);
  ASSERT_OK(Load("a", 1));
  ASSERT_OK(Load("b", 2));
  for (const char* lora : {"a", "b"}) {
    (void)Run(prompt, With(lora));
    EXPECT_EQ(*engine_->PinPrefix("m", prompt, lora), 32);
  }
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 4);
  ASSERT_OK(engine_->UnloadLora("m", "a"));
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 2);
  ASSERT_OK(engine_->StopModel("m"));
  EXPECT_OK(engine_->UnloadLora("m", "b"));  // A model that does not run has no pins.
}

TEST_F(LoraTest, NoneCanBeLoadedWhereTheLimitIsZero) {
  RuntimeConfig config = LoraConfig();
  config.lora_max_num = 0;
  InstallAndStart(config);
  EXPECT_EQ(Load("a", 1).as_status(), AsStatus::kLoraNumExceedLimitError);
}

// Another adapter under the same name must not find the first one's keys and values.
TEST_F(LoraTest, PrefixesBelongToTheAdapter) {
  InstallAndStart(LoraConfig());
  ASSERT_OK(Load("a", 1));
  ASSERT_OK(Load("other", 2));
  const Ids prompt = RandomPrompt(rng_, 70, vocab_size_);
  const Ids plain = Run(prompt, With("")), first = Run(prompt, With("a"));
  const Ids other = Run(prompt, With("other"));
  EXPECT_NE(plain, first);
  EXPECT_NE(first, other);
  EXPECT_EQ(*engine_->FindPrefix("m", prompt), 64);
  EXPECT_EQ(*engine_->FindPrefix("m", prompt, "a"), 64);
  EXPECT_EQ(engine_->FindPrefix("m", prompt, "b").status().as_status(), AsStatus::kLoraNotFound);
  EXPECT_EQ(*engine_->PinPrefix("m", prompt, "a"), 64);
  EXPECT_EQ(*engine_->UnpinPrefix("m", prompt), 0);
  EXPECT_EQ(*engine_->UnpinPrefix("m", prompt, "a"), 64);
  // With cached prefixes, each request gives the same output again.
  EXPECT_EQ(Run(prompt, With("a")), first);
  EXPECT_EQ(Run(prompt, With("")), plain);
  ASSERT_OK(engine_->UnloadLora("m", "a"));
  ASSERT_OK(Load("a", 2));
  EXPECT_EQ(*engine_->FindPrefix("m", prompt, "a"), 0);
  EXPECT_EQ(Run(prompt, With("a")), other);
}

// 24 requests of every kind, with one of three adapters or none, in a pool so small that requests
// are preempted.
TEST_F(LoraTest, ACrowdGivesWhatEachGivesAlone) {
  RuntimeConfig config = LoraConfig();
  config.num_blocks = 16;
  InstallAndStart(config);
  const std::string names[] = {"", "a", "b", "c"};
  for (uint64_t i = 1; i < 4; ++i) ASSERT_OK(Load(names[i], i, i == 2 ? 16 : 3));
  struct Job {
    Ids prompt;
    GenerationConfig config;
    Ids alone;
  };
  std::vector<Job> jobs;
  for (int64_t i = 0; i < 24; ++i) {
    GenerationConfig generation = Greedy(60);
    if (i % 3 == 0) {
      generation.do_sample = true;
      generation.seed = i;
    }
    if (i % 5 == 0) generation.prompt_lookup_num_tokens = 4;
    if (i % 7 == 0) {
      generation.do_sample = false;
      generation.prompt_lookup_num_tokens = 0;
      generation.num_beams = 3;
    }
    const int64_t length = 1 + static_cast<int64_t>(rng_() % 90);
    jobs.push_back(
        {RandomPrompt(rng_, length, vocab_size_), With(names[rng_() % 4], generation), {}});
    if (i % 4 == 1) jobs.back().prompt = jobs[static_cast<size_t>(i - 1)].prompt;
  }
  for (Job& job : jobs) job.alone = Run(job.prompt, job.config);
  ASSERT_OK(engine_->StopModel("m"));
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  std::vector<StartedRequest> started;
  for (const Job& job : jobs) started.push_back(Start(job.prompt, job.config));
  hook_.loop_gate.Open();
  for (size_t i = 0; i < jobs.size(); ++i) {
    EXPECT_EQ(ReadAll(*started[i].queue), jobs[i].alone)
        << "request " << i << " of adapter '" << jobs[i].config.lora_name << "'";
  }
  EXPECT_GT(engine_->GetEngineStat("m")->num_preemptions, 0);
}

}  // namespace
}  // namespace allspark
