// Requests that end as GenerateInterrupted when the KV cache is full, if the runtime config says
// so.

#include "cpp/engine/engine_harness.h"

namespace allspark::testing {
namespace {

RuntimeConfig TightConfig() {
  RuntimeConfig config = SmallConfig();
  config.num_blocks = 20;  // 16 for the longest request
  config.interrupt_on_cache_exhaustion = true;
  return config;
}

// DashInfer's over-commit scenario: requests end interrupted or finished, and in no other way.
TEST_F(EngineTest, SomeAreInterruptedAndKeepWhatTheyGenerated) {
  Install(TightConfig());
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  std::vector<StartedRequest> requests;
  std::vector<Ids> prompts;
  for (int i = 0; i < 10; ++i) {
    prompts.push_back(RandomPrompt(rng_, 40, vocab_size_));
    requests.push_back(Start(prompts.back(), Greedy(120)));
  }
  hook_.loop_gate.Open();
  ASSERT_OK(engine_->SyncAllRequests("m"));
  int64_t num_interrupted = 0, num_finished = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    ResultQueue& queue = *requests[i].queue;
    const Ids output = ReadAll(queue);
    const Ids whole = Run(prompts[i], Greedy(120));  // alone it fits
    ASSERT_EQ(whole.size(), 120u);
    if (queue.GenerateStatus() == GenerateRequestStatus::kGenerateInterrupted) {
      ++num_interrupted;
      EXPECT_EQ(queue.finish_reason(), FinishReason::kInterrupted);
      EXPECT_NE(queue.error().find("interrupt_on_cache_exhaustion"), std::string::npos);
      EXPECT_GT(output.size(), 0u);
      EXPECT_LT(output.size(), 120u);
      EXPECT_EQ(output, Ids(whole.begin(), whole.begin() + static_cast<int64_t>(output.size())));
    } else {
      ++num_finished;
      EXPECT_EQ(queue.GenerateStatus(), GenerateRequestStatus::kGenerateFinished);
      EXPECT_EQ(queue.error(), "");
      EXPECT_EQ(output, whole);
    }
  }
  EXPECT_GT(num_interrupted, 1);
  EXPECT_GT(num_finished, 1);
  const EngineStat stat = *engine_->GetEngineStat("m");
  EXPECT_EQ(stat.num_preemptions, 0);
  EXPECT_EQ(stat.used_blocks, 0);
  EXPECT_EQ(stat.pending_request + stat.running_request, 0);
}

// No later step would correct the statistics.
TEST_F(EngineTest, AnInterruptedSearchLeavesNoBlocksInTheStatistics) {
  InstallAndStart(TightConfig());
  GenerationConfig beams = Greedy(200);
  beams.num_beams = beams.num_return_sequences = 6;
  const StartedRequest request = Start(RandomPrompt(rng_, 20, vocab_size_), beams);
  EXPECT_TRUE(ReadAll(*request.queue).empty());
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kInterrupted);
  const EngineStat stat = *engine_->GetEngineStat("m");
  EXPECT_EQ(stat.used_blocks, 0);
  EXPECT_EQ(stat.running_request, 0);
}

TEST_F(EngineTest, AnInterruptedGroupEndsWhole) {
  InstallAndStart(TightConfig());
  const int rounds = 8;
  int64_t num_interrupted = 0;
  for (int round = 0; round < rounds; ++round) {
    const Ids prompt = RandomPrompt(rng_, 20 + round, vocab_size_);
    GenerationConfig beams = Greedy(60);
    beams.num_beams = 3;
    beams.num_return_sequences = 3;
    GenerationConfig samples;
    samples.best_of = samples.num_return_sequences = 4;
    samples.max_new_tokens = 80;
    samples.seed = round;
    // The prompts are equal: other requests also use the blocks that a sample should have filled.
    const std::vector<StartedRequest> requests{Start(prompt, Greedy(150)), Start(prompt, samples),
                                               Start(prompt, beams), Start(prompt, samples),
                                               Start(prompt, Greedy(100))};
    for (const StartedRequest& request : requests) {
      const Ids best = ReadAll(*request.queue);
      const FinishReason reason = request.queue->finish_reason();
      if (reason == FinishReason::kInterrupted) ++num_interrupted;
      EXPECT_NE(reason, FinishReason::kError) << request.queue->error();
      for (const StartedRequest& next : request.next_best) {
        EXPECT_EQ(next.queue->finish_reason() == FinishReason::kInterrupted,
                  reason == FinishReason::kInterrupted);
        EXPECT_EQ(ReadAll(*next.queue).empty(), best.empty());
      }
    }
    EXPECT_EQ(requests[0].queue->finish_reason(), FinishReason::kLength) << "the oldest one";
    ASSERT_OK(engine_->SyncAllRequests("m"));
    EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
  }
  EXPECT_GT(num_interrupted, rounds);
}

}  // namespace
}  // namespace allspark::testing
