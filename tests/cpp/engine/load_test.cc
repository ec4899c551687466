// Load: many requests from many threads, with random stops and releases, with and without enough
// memory.

#include <atomic>
#include <thread>

#include "cpp/engine/engine_harness.h"
#include "support/sanitized.h"

namespace allspark::testing {
namespace {

constexpr int kRequestsPerThread = AS_SANITIZED ? 15 : 63;
constexpr int kThreads = 8;

TEST_F(EngineTest, EightThreadsWithRandomStopsAndReleases) {
  RuntimeConfig config = SmallConfig();
  config.engine_max_batch = 16;
  config.num_blocks = 48;
  InstallAndStart(config);
  const AllocatorStats before = TestingAccess::DeviceStats(*engine_);
  std::atomic<int> ended{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 rng(static_cast<uint32_t>(t));
      std::vector<StartedRequest> open;
      const auto finish = [&](size_t i) {
        StartedRequest request = open[i];
        open.erase(open.begin() + static_cast<int64_t>(i));
        const uint32_t dice = rng() % 4;
        if (dice == 0) {
          EXPECT_OK(engine_->StopRequest("m", request.handle));
        }
        if (dice == 1) {
          EXPECT_OK(engine_->ReleaseRequest("m", request.handle));
        }
        const Ids ids = ReadAll(*request.queue);
        EXPECT_EQ(ids.size(), request.queue->GeneratedLength()) << "every token, once";
        EXPECT_TRUE(IsTerminal(request.queue->GenerateStatus()));
        EXPECT_NE(request.queue->finish_reason(), FinishReason::kError) << request.queue->error();
        if (request.queue->finish_reason() == FinishReason::kLength) {
          EXPECT_GE(ids.size(), 1u);
        }
        if (dice != 1) {
          EXPECT_OK(engine_->ReleaseRequest("m", request.handle));
        }
        ++ended;
      };
      for (int i = 0; i < kRequestsPerThread; ++i) {
        open.push_back(Start(RandomPrompt(rng, 1 + rng() % 60, vocab_size_),
                             Greedy(1 + static_cast<int64_t>(rng() % 40))));
        if (open.size() > 12) finish(rng() % open.size());
      }
      while (!open.empty()) finish(0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ended, kThreads * kRequestsPerThread);
  const EngineStat stat = *engine_->GetEngineStat("m");
  EXPECT_EQ(stat.used_blocks, 0);
  EXPECT_EQ(stat.running_request + stat.pending_request, 0);
  EXPECT_EQ(TestingAccess::DeviceStats(*engine_).bytes_in_use, before.bytes_in_use);
}

TEST_F(EngineTest, AQuarterOfTheMemoryGivesTheSameTokens) {
  struct Job {
    Ids prompt;
    GenerationConfig config;
  };
  std::vector<Job> jobs;
  const int64_t vocab_size = TinyLlamaSpec().vocab_size();
  for (int i = 0; i < 40; ++i) {
    const int64_t length = 30 + static_cast<int64_t>(rng_() % 90);
    jobs.push_back({RandomPrompt(rng_, length, vocab_size), Greedy(60)});
  }
  const auto run_all = [&](int64_t num_blocks) {
    RuntimeConfig config = SmallConfig();
    config.engine_max_batch = 16;
    config.engine_max_prefill_length = 64;  // prompts come in before others end
    config.num_blocks = num_blocks;
    hook_.loop_gate.Close();
    InstallAndStart(config);
    std::vector<StartedRequest> requests;
    for (const Job& job : jobs) requests.push_back(Start(job.prompt, job.config));
    hook_.loop_gate.Open();
    std::vector<Ids> tokens;
    for (const StartedRequest& request : requests) {
      tokens.push_back(ReadAll(*request.queue));
      EXPECT_EQ(request.queue->finish_reason(), FinishReason::kLength);
    }
    const int64_t preemptions = engine_->GetEngineStat("m")->num_preemptions;
    EXPECT_OK(engine_->StopModel("m"));
    EXPECT_OK(engine_->ReleaseModel("m"));
    return std::make_pair(tokens, preemptions);
  };
  // 16 requests of up to 180 tokens take 12 blocks of 16 each.
  const auto [free_tokens, free_preemptions] = run_all(16 * 12);
  const auto [tight_tokens, tight_preemptions] = run_all(16 * 12 / 4);
  EXPECT_EQ(free_preemptions, 0);
  EXPECT_GT(tight_preemptions, 0);
  EXPECT_EQ(tight_tokens, free_tokens);
}

class PrefillPolicyTest : public EngineTest {
 protected:
  static constexpr int64_t kChunk = 32, kPrompt = 1000;

  struct Steps {
    int64_t first = 0;                 // prompt tokens of the prompt's first step
    int64_t most_beside_a_decode = 0;  // prompt tokens
    int64_t with_both = 0;
    int64_t most_without_decodes = 0;  // in a row, while there was one
  };
  // A prompt that arrives while another request decodes, until its first token.
  Steps PrefillBesideADecode(PrefillPolicy policy) {
    RuntimeConfig config = SmallConfig();
    config.engine_max_length = 2048;
    config.engine_max_prefill_length = kChunk;
    config.prefill_policy = policy;
    Install(config);
    std::vector<StepEvent> events;  // used by the step thread until it has stopped
    const HookGuard guard(hook_);
    hook_.Set([&](const StepEvent& event) {
      if (event.phase != StepPhase::kBegin) return;
      events.push_back(event);
      if (events.size() == 3) gate_.Pass();
    });
    gate_.Close();
    EXPECT_OK(engine_->StartModel("m"));
    const StartedRequest decoding = Start({1, 2}, Greedy(2000));
    gate_.WaitArrived();
    const StartedRequest prefilling = Start(RandomPrompt(rng_, kPrompt, vocab_size_), Greedy(2));
    gate_.Open();
    ReadAll(*prefilling.queue);
    EXPECT_OK(engine_->StopRequest("m", decoding.handle));
    ReadAll(*decoding.queue);
    EXPECT_OK(engine_->StopModel("m"));
    Steps steps;
    int64_t without_decodes = 0, prefilled = 0;
    for (const StepEvent& event : events) {
      prefilled += event.num_prefill_tokens;
      if (&event < &events[3] || event.num_prefill_tokens == 0) continue;
      EXPECT_LE(event.num_prefill_tokens, kChunk);
      if (steps.first == 0) steps.first = event.num_prefill_tokens;
      without_decodes = event.num_decodes > 0 ? 0 : without_decodes + 1;
      steps.most_without_decodes = std::max(steps.most_without_decodes, without_decodes);
      if (event.num_decodes == 0) continue;
      ++steps.with_both;
      steps.most_beside_a_decode = std::max(steps.most_beside_a_decode, event.num_prefill_tokens);
    }
    EXPECT_EQ(prefilled, 2 + kPrompt);
    return steps;
  }
};

TEST_F(PrefillPolicyTest, BalancedHasAQuarterOfTheChunk) {
  const Steps steps = PrefillBesideADecode(PrefillPolicy::kBalanced);
  EXPECT_EQ(steps.most_beside_a_decode, kChunk / 4 - 1);
  EXPECT_EQ(steps.most_without_decodes, 0);
}

TEST_F(PrefillPolicyTest, SmoothHasASixteenth) {
  const Steps steps = PrefillBesideADecode(PrefillPolicy::kSmooth);
  EXPECT_EQ(steps.most_beside_a_decode, kChunk / 16 - 1);
  EXPECT_EQ(steps.most_without_decodes, 0);
}

TEST_F(PrefillPolicyTest, ThroughputHasAWholeChunk) {
  const Steps steps = PrefillBesideADecode(PrefillPolicy::kThroughput);
  EXPECT_EQ(steps.most_beside_a_decode, kChunk);
  EXPECT_EQ(steps.with_both, kPrompt / kChunk + 1);
  EXPECT_EQ(steps.most_without_decodes, 0);
}

TEST_F(PrefillPolicyTest, FirstTokenLetsDecodesWaitForEightSteps) {
  const Steps steps = PrefillBesideADecode(PrefillPolicy::kFirstToken);
  EXPECT_EQ(steps.first, kChunk);
  EXPECT_LT(steps.most_beside_a_decode, kChunk);  // eight chunks into the prompt
  EXPECT_EQ(steps.most_without_decodes, 8);
  EXPECT_GE(steps.with_both, (kPrompt / kChunk + 1) / 9);
}

}  // namespace
}  // namespace allspark::testing
