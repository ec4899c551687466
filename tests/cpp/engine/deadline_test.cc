// Deadlines: in any state, a request ends with the tokens that it has. Priorities: which waiting
// request runs first.

#include <algorithm>
#include <chrono>
#include <future>
#include <thread>

#include "cpp/engine/engine_harness.h"
#include "cpp/engine/function_mask.h"

namespace allspark::testing {
namespace {

constexpr int64_t kDeadlineMs = 30;
// Long enough for any machine, and short enough that a hanging test is noticed.
constexpr int64_t kLongMs = 60000;

GenerationConfig Timed(int64_t max_new_tokens, int64_t timeout_ms) {
  GenerationConfig config = Greedy(max_new_tokens);
  config.timeout_ms = timeout_ms;
  return config;
}

class DeadlineTest : public EngineTest {
 protected:
  void SlowSteps() {
    hook_.Set([](const StepEvent& event) {
      if (event.phase == StepPhase::kBegin)
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    });
  }
  // Waits for the end and checks that the deadline caused it.
  void ExpectExpired(const StartedRequest& request) {
    ASSERT_OK(engine_->SyncRequest("m", request.handle, kLongMs));
    EXPECT_EQ(request.queue->finish_reason(), FinishReason::kDeadline);
    EXPECT_EQ(request.queue->GenerateStatus(), GenerateRequestStatus::kGenerateFinished);
    EXPECT_EQ(request.queue->error(), "");
  }
};

TEST_F(DeadlineTest, ARunningRequestEndsWithWhatItHas) {
  InstallAndStart(SmallConfig());
  const Ids whole = Run({1, 2, 3}, Greedy(250));
  SlowSteps();
  const auto begin = std::chrono::steady_clock::now();
  const StartedRequest request = Start({1, 2, 3}, Timed(250, kDeadlineMs));
  ExpectExpired(request);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(kDeadlineMs));
  const Ids ids = ReadAll(*request.queue);
  EXPECT_LT(ids.size(), whole.size());
  EXPECT_EQ(ids, Ids(whole.begin(), whole.begin() + static_cast<int64_t>(ids.size())));
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
  EXPECT_FALSE(request.queue->Get().has_value());
}

TEST_F(DeadlineTest, ADeadlineThatIsNotReachedChangesNothing) {
  InstallAndStart(SmallConfig());
  const Ids ids = Run({1, 2, 3}, Greedy(20));
  EXPECT_EQ(Run({1, 2, 3}, Timed(20, kLongMs)), ids);
  const StartedRequest stopped = Start({1, 2, 3}, Timed(250, kLongMs));
  EXPECT_OK(engine_->ReleaseRequest("m", stopped.handle));
  ReadAll(*stopped.queue);
  EXPECT_NE(stopped.queue->finish_reason(), FinishReason::kDeadline);
}

TEST_F(DeadlineTest, AWaitingRequestEndsInItsQueue) {
  RuntimeConfig config = SmallConfig();
  config.engine_max_batch = 1;
  config.token_mask_timeout_ms = kLongMs;
  InstallAndStart(config);
  // The request that runs has its first mask once the one that waits has ended.
  std::promise<FunctionMask*> asked;
  auto mask = std::make_shared<FunctionMask>([&asked, n = 0](FunctionMask& own, int32_t) mutable {
    n++ == 0 ? asked.set_value(&own) : own.PublishEvery(1);
  });
  const StartedRequest running = *engine_->StartRequest("m", Ids{1, 2, 3}, Greedy(200), mask);
  FunctionMask* const late = asked.get_future().get();
  const StartedRequest patient = Start({4, 5}, Timed(3, kLongMs));
  const StartedRequest waiting = Start({4, 5}, Timed(3, kDeadlineMs));
  ExpectExpired(waiting);
  EXPECT_EQ(waiting.queue->GeneratedLength(), 0u);
  EXPECT_FALSE(waiting.queue->Get().has_value());
  EXPECT_FALSE(IsTerminal(running.queue->GenerateStatus()));
  late->PublishEvery(1);
  EXPECT_EQ(ReadAll(*running.queue).size(), 200u);
  EXPECT_EQ(ReadAll(*patient.queue).size(), 3u);
}

TEST_F(DeadlineTest, APromptThatIsHalfComputedIsGivenUp) {
  InstallAndStart(SmallConfig());
  int begun = 0;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    // The prompt takes 7 chunks of 32; the second outlasts the deadline.
    if (event.phase == StepPhase::kBegin && ++begun == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2 * kDeadlineMs));
    }
  });
  GenerationConfig config = Timed(5, kDeadlineMs);
  config.prompt_only = true;
  const StartedRequest prompt_only = Start(Ids(200, 3), config);
  ExpectExpired(prompt_only);
  EXPECT_LE(begun, 2);
  EXPECT_FALSE(prompt_only.queue->Get().has_value());
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
}

TEST_F(DeadlineTest, WhatIsOverBeforeItBeganIsNotComputed) {
  Install(SmallConfig());
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  const StartedRequest request = Start({1, 2, 3}, Timed(5, 1));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  hook_.loop_gate.Open();
  ExpectExpired(request);
  EXPECT_EQ(engine_->GetEngineStat("m")->num_steps, 0);
}

TEST_F(DeadlineTest, AMaskThatDoesNotComeHoldsNobodyElseAndNobodyBeyondADeadline) {
  RuntimeConfig config = SmallConfig();
  config.token_mask_timeout_ms = kLongMs;
  Install(config);
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  auto silent = std::make_shared<FunctionMask>([](FunctionMask&, int32_t) {});
  const StartedRequest guided =
      *engine_->StartRequest("m", Ids{1, 2}, Timed(9, 8 * kDeadlineMs), silent);
  GenerationConfig search = Greedy(9);
  search.num_beams = 3;
  search.repetition_penalty = 1.5;
  const StartedRequest beams = Start({1, 2, 3}, search);
  const StartedRequest plain = Start({1, 2, 3}, Greedy(9));
  hook_.loop_gate.Open();
  const Ids plain_ids = ReadAll(*plain.queue), beam_ids = ReadAll(*beams.queue);
  ExpectExpired(guided);
  EXPECT_EQ(guided.queue->GeneratedLength(), 0u);
  EXPECT_EQ(plain_ids, Run({1, 2, 3}, Greedy(9)));
  EXPECT_EQ(beam_ids, Run({1, 2, 3}, search));
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
}

TEST_F(DeadlineTest, AGroupEndsAsAWhole) {
  InstallAndStart(SmallConfig());
  SlowSteps();
  GenerationConfig search = Timed(200, kDeadlineMs);
  search.num_beams = search.num_return_sequences = 3;
  GenerationConfig samples = Timed(200, kDeadlineMs);
  samples.do_sample = true;
  samples.best_of = samples.num_return_sequences = 3;
  samples.seed = 4;
  // The first sample ends long before the others.
  samples.stop_token_ids = {Run({1, 2, 3}, [&] {
    GenerationConfig first = Greedy(2);
    first.do_sample = true;
    first.seed = 4;
    return first;
  }())[1]};
  for (const GenerationConfig& config : {search, samples}) {
    const StartedRequest request = Start({1, 2, 3}, config);
    ExpectExpired(request);
    for (const StartedRequest& other : request.next_best) {
      EXPECT_EQ(other.queue->finish_reason(), FinishReason::kDeadline);
      EXPECT_FALSE(other.queue->Get().has_value());
    }
    EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
  }
}

TEST_F(DeadlineTest, ABadTimeoutIsRefused) {
  InstallAndStart(SmallConfig());
  for (const int64_t timeout_ms : {int64_t{-1}, int64_t{1000000001}}) {
    const Status status = engine_->StartRequest("m", Ids{1}, Timed(1, timeout_ms)).status();
    EXPECT_EQ(status.as_status(), AsStatus::kParamError);
    EXPECT_NE(status.message().find("timeout_ms is " + std::to_string(timeout_ms)),
              std::string::npos)
        << status.message();
  }
}

TEST_F(EngineTest, ALargerPriorityRunsEarlier) {
  RuntimeConfig config = SmallConfig();
  config.engine_max_batch = 1;
  Install(config);
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  std::vector<std::pair<int64_t, StartedRequest>> requests;
  for (const int64_t priority : {0, -5, 7, 0, 7}) {
    GenerationConfig generation = Greedy(3);
    generation.priority = priority;
    requests.emplace_back(priority, Start({1, 2, 3}, generation));
  }
  std::vector<uint64_t> begun;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    if (event.phase != StepPhase::kLogits) return;
    if (begun.empty() || begun.back() != event.request_id) begun.push_back(event.request_id);
  });
  hook_.loop_gate.Open();
  ASSERT_OK(engine_->SyncAllRequests("m", kLongMs));
  std::stable_sort(requests.begin(), requests.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<uint64_t> expected;
  for (const auto& [priority, request] : requests) expected.push_back(request.handle.id);
  EXPECT_EQ(begun, expected) << "by priority, those of one priority as they came";
}

}  // namespace
}  // namespace allspark::testing
