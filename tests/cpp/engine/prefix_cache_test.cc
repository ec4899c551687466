// The prefix cache through the whole engine: found prefixes are reported, and change no bit.

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>

#include "cpp/engine/engine_harness.h"

namespace allspark::testing {
namespace {

Ids Join(Ids ids, const Ids& more) {
  ids.insert(ids.end(), more.begin(), more.end());
  return ids;
}

class PrefixCacheTest : public EngineTest {
 protected:
  // Runs a request to its end; returns how many tokens of its prompt were found.
  int64_t Found(const Ids& prompt, int64_t max_new_tokens = 1) {
    const StartedRequest request = Start(prompt, Greedy(max_new_tokens));
    EXPECT_OK(engine_->SyncRequest("m", request.handle));
    const GeneratedElements elements = *request.queue->Get();
    const auto& [here, elsewhere] =
        testing::kOnSim ? std::tie(elements.prefix_len_gpu, elements.prefix_len_cpu)
                        : std::tie(elements.prefix_len_cpu, elements.prefix_len_gpu);
    EXPECT_EQ(here, elements.prefix_cache_len);
    EXPECT_EQ(elsewhere, 0);
    EXPECT_EQ(request.queue->RequestStatInfo().at("context_cached_length"),
              elements.prefix_cache_len);
    return elements.prefix_cache_len;
  }
  Ids Prompt(int64_t length) { return RandomPrompt(rng_, length, vocab_size_); }
};

TEST_F(PrefixCacheTest, FindsFullBlocksOfPromptsAndAnswers) {
  InstallAndStart(SmallConfig());
  const Ids prompt = Prompt(70);
  EXPECT_EQ(Found(prompt), 0);
  EXPECT_EQ(Found(prompt), 64);
  Ids other = prompt;
  other[40] = (other[40] + 1) % vocab_size_;
  EXPECT_EQ(Found(other), 32);
  EXPECT_EQ(Found(Ids(prompt.begin(), prompt.begin() + 64)), 48) << "the last token is computed";
  EXPECT_EQ(Found(Ids(prompt.begin(), prompt.begin() + 65)), 64);
  EXPECT_EQ(Found(Prompt(70)), 0);
  // FindPrefix is answered between steps: the last step has been counted.
  EXPECT_EQ(*engine_->FindPrefix("m", prompt), 64);
  const EngineStat stat = *engine_->GetEngineStat("m");
  EXPECT_EQ(stat.prefix_cache_hit_token, 64 + 32 + 48 + 64);
  EXPECT_EQ(stat.prefix_cache_miss_token, 70 + 6 + 38 + 16 + 1 + 70);
  EXPECT_DOUBLE_EQ(stat.prefix_cache_hit_rate, 208.0 / (208 + 201));
  EXPECT_DOUBLE_EQ(stat.prefix_cache_miss_rate, 201.0 / (208 + 201));
  EXPECT_EQ(stat.used_blocks, 0);
  EXPECT_EQ(stat.cached_blocks, 4 + 2 + 4);
  EXPECT_EQ(stat.free_blocks, stat.total_blocks);

  // The next turn of a conversation: prompt and answer. The answer's last token was not computed.
  const Ids answer = Run(prompt, Greedy(42));
  EXPECT_EQ(Found(Join(Join(prompt, answer), Prompt(5))), (70 + 41) / 16 * 16);

  ASSERT_OK(engine_->StopModel("m"));
  EXPECT_EQ(engine_->GetEngineStat("m")->cached_blocks, 0);
  ASSERT_OK(engine_->StartModel("m"));
  EXPECT_EQ(Found(prompt), 0) << "a model starts with nothing";
}

TEST_F(PrefixCacheTest, SequencesOfOnePromptShareIt) {
  Install(SmallConfig());
  const Ids prompt = Prompt(100);
  ASSERT_OK(engine_->StartModel("m"));
  std::vector<Ids> alone;
  for (int i = 0; i < 6; ++i) alone.push_back(Run(prompt, Drawn(30, i)));
  ASSERT_OK(engine_->StopModel("m"));

  int64_t num_prefilled = 0, most_blocks = 0;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    if (event.phase == StepPhase::kBegin) num_prefilled += event.num_prefill_tokens;
    if (event.phase == StepPhase::kEnd) {
      most_blocks = std::max(most_blocks, engine_->GetEngineStat("m")->used_blocks);
    }
  });
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  std::vector<StartedRequest> together;
  for (int i = 0; i < 6; ++i) {
    Ids ids = prompt;
    if (i == 5) ids[40] = (ids[40] + 1) % vocab_size_;  // two blocks of 16 are the same
    together.push_back(Start(ids, Drawn(30, i)));
  }
  hook_.loop_gate.Open();
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(ReadAll(*together[i].queue), alone[i]) << i;
  EXPECT_NE(ReadAll(*together[5].queue), alone[5]);
  hook_.Set({});  // the last step may still be at its end
  // 6 of 7 blocks are shared: the rest of each is 4 tokens.
  EXPECT_EQ(num_prefilled, 100 + 4 * 4 + (100 - 32));
  EXPECT_LE(most_blocks, 6 + 5 * 3 + 7);
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
}

TEST_F(PrefixCacheTest, SharingSurvivesPreemptionAndStops) {
  RuntimeConfig config = SmallConfig();
  config.num_blocks = 16;
  InstallAndStart(config);
  const Ids prompt = Prompt(70);
  std::vector<Ids> alone;
  std::vector<StartedRequest> together;
  for (int i = 0; i < 8; ++i) alone.push_back(Run(prompt, Drawn(100, i)));
  for (int i = 0; i < 8; ++i) together.push_back(Start(prompt, Drawn(100, i)));
  EXPECT_OK(engine_->StopRequest("m", together[0].handle));
  for (size_t i = 1; i < 8; ++i) EXPECT_EQ(ReadAll(*together[i].queue), alone[i]) << i;
  EXPECT_GT(engine_->GetEngineStat("m")->num_preemptions, 0);
  ASSERT_OK(engine_->SyncAllRequests("m"));
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
}

TEST_F(PrefixCacheTest, CanBeSwitchedOff) {
  RuntimeConfig config = SmallConfig();
  config.enable_prefix_cache = false;
  InstallAndStart(config);
  const Ids prompt = Prompt(70);
  EXPECT_EQ(Found(prompt), 0);
  EXPECT_EQ(Found(prompt), 0);
  EXPECT_EQ(engine_->GetEngineStat("m")->prefix_cache_hit_token, 0);
  EXPECT_EQ(engine_->GetEngineStat("m")->cached_blocks, 0);
  const Status status = engine_->FindPrefix("m", prompt).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("enable_prefix_cache"), std::string::npos);
}

TEST_F(PrefixCacheTest, WithoutTimeToLiveOnlyWhatRunsIsShared) {
  RuntimeConfig config = SmallConfig();
  config.prefix_cache_ttl = 0;
  Install(config);
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  const Ids prompt = Prompt(70);
  const StartedRequest first = Start(prompt, Greedy(20));
  const StartedRequest second = Start(prompt, Greedy(20));
  hook_.loop_gate.Open();
  EXPECT_EQ(ReadAll(*first.queue), ReadAll(*second.queue));
  EXPECT_EQ(second.queue->RequestStatInfo().at("context_cached_length"), 64);
  EXPECT_EQ(*engine_->FindPrefix("m", prompt), 0);
  EXPECT_EQ(Found(prompt), 0);
}

TEST_F(PrefixCacheTest, FindPinAndClear) {
  RuntimeConfig config = SmallConfig();
  config.num_blocks = 20;  // 16 for the longest request, and 4
  InstallAndStart(config);
  const Ids system = Prompt(70);
  EXPECT_EQ(*engine_->FindPrefix("m", system), 0);
  EXPECT_EQ(*engine_->PinPrefix("m", system), 0);
  Found(system);
  EXPECT_EQ(*engine_->FindPrefix("m", system), 64);
  EXPECT_EQ(*engine_->FindPrefix("m", Ids(system.begin(), system.begin() + 64)), 64);
  EXPECT_EQ(*engine_->FindPrefix("m", {}), 0);
  EXPECT_EQ(*engine_->PinPrefix("m", Join(system, Prompt(10))), 64);
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 4);
  // Other requests take all blocks; one of them has the greatest length.
  for (int64_t length : {100, 100, 100, 254}) Found(Prompt(length), 2);
  EXPECT_EQ(Found(system), 64);
  const Ids other = Prompt(40);
  Found(other);
  const Status refused = engine_->PinPrefix("m", other).status();
  EXPECT_EQ(refused.as_status(), AsStatus::kMemoryError) << refused.ToString();
  EXPECT_NE(refused.message().find("4 blocks are pinned and 2 more"), std::string::npos)
      << refused.message();
  EXPECT_EQ(*engine_->UnpinPrefix("m", system), 64);
  EXPECT_EQ(*engine_->UnpinPrefix("m", system), 0);
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
  for (int i = 0; i < 2; ++i) Found(Prompt(254), 2);
  EXPECT_EQ(*engine_->FindPrefix("m", system), 0);
  Found(system);
  EXPECT_EQ(*engine_->PinPrefix("m", system), 64);
  EXPECT_GE(*engine_->ClearPrefixCache("m"), 64);
  EXPECT_EQ(*engine_->FindPrefix("m", system), 0);
  EXPECT_EQ(engine_->GetEngineStat("m")->cached_blocks, 0);

  EXPECT_EQ(engine_->FindPrefix("other", system).status().code(), StatusCode::kNotFound);
  const Status bad = engine_->PinPrefix("m", Ids{1, vocab_size_}).status();
  EXPECT_EQ(bad.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(bad.message().find("input_ids[1] is " + std::to_string(vocab_size_)),
            std::string::npos);
  ASSERT_OK(engine_->StopModel("m"));
  EXPECT_EQ(engine_->ClearPrefixCache("m").status().code(), StatusCode::kFailedPrecondition);
}

TEST_F(PrefixCacheTest, AFailedStepLeavesNothingBehind) {
  Install(SmallConfig());
  bool fails = true;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    if (event.phase == StepPhase::kBegin && fails) throw std::runtime_error("injected");
  });
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  const Ids prompt = Prompt(30);
  const StartedRequest first = Start(prompt, Greedy(2)), second = Start(prompt, Greedy(2));
  hook_.loop_gate.Open();
  for (const StartedRequest& request : {first, second}) {
    EXPECT_TRUE(ReadAll(*request.queue).empty());
    EXPECT_EQ(request.queue->finish_reason(), FinishReason::kError);
  }
  EXPECT_EQ(*engine_->FindPrefix("m", prompt), 0);
  hook_.Set({});
  EXPECT_EQ(Found(prompt), 0);
  EXPECT_EQ(Found(prompt), 16);
}

TEST_F(PrefixCacheTest, CallsFromManyThreadsWhileItRunsAndStops) {
  InstallAndStart(SmallConfig());
  const Ids prompt = Prompt(60);
  std::atomic<bool> stopped{false};
  std::atomic<int64_t> answered{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      while (!stopped) {
        const Result<int64_t> tokens = t == 0   ? engine_->FindPrefix("m", prompt)
                                       : t == 1 ? engine_->PinPrefix("m", prompt)
                                       : t == 2 ? engine_->UnpinPrefix("m", prompt)
                                                : engine_->ClearPrefixCache("m");
        if (tokens.ok()) {
          ++answered;
        } else {
          EXPECT_TRUE(tokens.status().as_status() == AsStatus::kRequestDenied ||
                      tokens.status().code() == StatusCode::kFailedPrecondition)
              << tokens.status().ToString();
        }
      }
    });
  }
  const Ids expected = Run(prompt, Greedy(20));
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Run(prompt, Greedy(20)), expected);
  while (answered < 200) std::this_thread::yield();
  const StartedRequest last = Start(prompt, Greedy(150));
  ASSERT_OK(engine_->StopModel("m"));
  stopped = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
}

// Tokens and digests of logits are the same whether the prefix was computed, found, found in part,
// evicted meanwhile, or found again after a preemption.
class PrefixNumericsTest
    : public PrefixCacheTest,
      public ::testing::WithParamInterface<std::tuple<proto::ComputeType, CacheMode>> {
 protected:
  struct Outcome {
    Ids tokens;
    std::vector<uint64_t> digests;
    bool operator==(const Outcome&) const = default;
  };

  void OnEvent(const StepEvent& event) {
    if (event.phase != StepPhase::kLogits) return;
    digests_[event.request_id].push_back(testing::LogitsDigest(event));
  }
  std::vector<StartedRequest> StartAll(const std::vector<Ids>& prompts) {
    std::vector<StartedRequest> requests;
    for (size_t i = 0; i < prompts.size(); ++i) {
      GenerationConfig config = Drawn(40, static_cast<int64_t>(i));
      if (i % 3 == 0) config.do_sample = false;
      if (i % 4 == 1) config.prompt_lookup_num_tokens = 3;
      if (i % 5 == 2) config.prompt_logprobs = true;
      requests.push_back(Start(prompts[i], config));
    }
    return requests;
  }
  std::vector<Outcome> Read(const std::vector<StartedRequest>& requests) {
    std::vector<Outcome> outcomes;
    for (const StartedRequest& request : requests)
      outcomes.push_back({ReadAll(*request.queue), {}});
    // The step thread adds digests until all requests have ended.
    for (size_t i = 0; i < requests.size(); ++i) {
      outcomes[i].digests = digests_[requests[i].handle.id];
    }
    return outcomes;
  }

  std::map<uint64_t, std::vector<uint64_t>> digests_;
};

TEST_P(PrefixNumericsTest, AHitChangesNoBit) {
  const auto [compute_type, cache_mode] = GetParam();
  const proto::DecoderSpec spec = TinyQwen2Spec(compute_type);
  vocab_size_ = spec.vocab_size();
  // Prefixes of prefixes, each with an end of its own.
  std::vector<Ids> prompts;
  const Ids longest = Prompt(120);
  for (int i = 0; i < 12; ++i) {
    const Ids beginning(longest.begin(), longest.begin() + static_cast<int64_t>(rng_() % 120));
    prompts.push_back(Join(beginning, Prompt(1 + static_cast<int64_t>(rng_() % 20))));
  }
  const HookGuard guard(hook_);
  hook_.Set([this](const StepEvent& event) { OnEvent(event); });
  RuntimeConfig config = SmallConfig();
  config.cache_mode = cache_mode;
  config.enable_prefix_cache = false;
  InstallAndStart(config, spec);
  const std::vector<Outcome> expected = Read(StartAll(prompts));
  ASSERT_OK(engine_->StopModel("m"));
  ASSERT_OK(engine_->ReleaseModel("m"));

  config.enable_prefix_cache = true;
  // Room for all, and room for little more than the longest request: there blocks are evicted and
  // sequences preempted over and over.
  for (const int64_t num_blocks : {200, 18}) {
    config.num_blocks = num_blocks;
    hook_.loop_gate.Close();
    InstallAndStart(config, spec);
    for (int round = 0; round < 3; ++round) {
      const std::vector<StartedRequest> requests = StartAll(prompts);
      hook_.loop_gate.Open();
      const std::vector<Outcome> outcomes = Read(requests);
      for (size_t i = 0; i < prompts.size(); ++i) {
        EXPECT_EQ(outcomes[i].tokens, expected[i].tokens) << i << " of round " << round;
        EXPECT_EQ(outcomes[i].digests, expected[i].digests) << i << " of round " << round;
      }
    }
    const EngineStat stat = *engine_->GetEngineStat("m");
    EXPECT_GT(stat.prefix_cache_hit_token, 1000);
    EXPECT_EQ(stat.num_preemptions > 0, num_blocks == 18);
    ASSERT_OK(engine_->StopModel("m"));
    ASSERT_OK(engine_->ReleaseModel("m"));
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, PrefixNumericsTest,
                         ::testing::Combine(::testing::Values(proto::COMPUTE_FLOAT32,
                                                              proto::COMPUTE_BFLOAT16),
                                            ::testing::ValuesIn(kCacheModes)),
                         ModeName);

}  // namespace
}  // namespace allspark::testing
