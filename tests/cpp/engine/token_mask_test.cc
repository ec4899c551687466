// Guided requests: what their masks allow, and providers that fail, hang or finish.

#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "cpp/engine/engine_harness.h"
#include "cpp/engine/function_mask.h"
#include "support/alloc_counter.h"

namespace allspark::testing {
namespace {

class TokenMaskTest : public EngineTest {
 protected:
  StartedRequest StartGuided(const Ids& prompt, const GenerationConfig& config,
                             std::shared_ptr<TokenMask> mask) {
    Result<StartedRequest> started = engine_->StartRequest("m", prompt, config, std::move(mask));
    EXPECT_TRUE(started.ok()) << started.status().ToString();
    return started.ok() ? *started : StartedRequest{};
  }
  // Runs one request to its end and checks how it ended.
  Ids RunGuided(std::shared_ptr<TokenMask> mask, FinishReason reason, const std::string& error = "",
                const GenerationConfig& config = Greedy(6)) {
    const StartedRequest request = StartGuided({1, 2, 3}, config, std::move(mask));
    const Ids ids = ReadAll(*request.queue);
    EXPECT_EQ(request.queue->finish_reason(), reason) << request.queue->error();
    EXPECT_NE(request.queue->error().find(error), std::string::npos) << request.queue->error();
    return ids;
  }
  static GenerationConfig Hot(int64_t seed, int64_t max_new_tokens = 24) {
    GenerationConfig config;
    config.temperature = 5;
    config.top_k = 0;
    config.seed = seed;
    config.max_new_tokens = max_new_tokens;
    return config;
  }
};

TEST_F(TokenMaskTest, OnlyAllowedTokensAreChosen) {
  InstallAndStart(SmallConfig());
  for (const bool sample : {false, true}) {
    std::vector<int32_t> asked;
    auto mask = std::make_shared<FunctionMask>([&](FunctionMask& m, int32_t token) {
      asked.push_back(token);
      m.PublishEvery(3, token + 1);
    });
    const Ids ids = RunGuided(mask, FinishReason::kLength, "", sample ? Hot(5, 30) : Greedy(30));
    ASSERT_EQ(ids.size(), 30u);
    int64_t last = -1;
    for (size_t i = 0; i < ids.size(); ++i) {
      EXPECT_EQ((ids[i] + last + 1) % 3, 0) << i;
      EXPECT_EQ(asked[i], last) << i;
      last = ids[i];
    }
    EXPECT_EQ(asked.size(), ids.size()) << "no mask is asked for after the last token";
    EXPECT_EQ(mask->num_ends(), 1);
  }
}

TEST_F(TokenMaskTest, NeighboursPreemptionAndLateAnswersChangeNoBit) {
  InstallAndStart(SmallConfig());
  std::vector<Ids> prompts, alone;
  for (int i = 0; i < 24; ++i) {
    prompts.push_back(RandomPrompt(rng_, 1 + (i * 17) % 30, vocab_size_));
    const StartedRequest request =
        StartGuided(prompts.back(), Hot(i, 60), i % 2 == 0 ? ThirdsMask() : nullptr);
    alone.push_back(ReadAll(*request.queue));
  }
  ASSERT_OK(engine_->StopModel("m"));
  ASSERT_OK(engine_->ReleaseModel("m"));
  RuntimeConfig crowded = SmallConfig();
  crowded.num_blocks = 16;  // one request of 256 tokens
  Install(crowded);
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  std::vector<std::thread> providers;
  std::mutex mutex;  // guards `providers`
  const auto answer_later = [&](FunctionMask& mask, int32_t token) {
    std::lock_guard lock(mutex);
    providers.emplace_back([&mask, token] {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      mask.PublishEvery(3, token + 1);
    });
  };
  std::vector<std::shared_ptr<FunctionMask>> masks;
  std::vector<StartedRequest> requests;
  for (int i = 0; i < 24; ++i) {
    masks.push_back(i % 2 == 0 ? std::make_shared<FunctionMask>(answer_later) : nullptr);
    requests.push_back(StartGuided(prompts[static_cast<size_t>(i)], Hot(i, 60), masks.back()));
  }
  hook_.loop_gate.Open();
  for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(ReadAll(*requests[i].queue), alone[i]);
  EXPECT_GT(engine_->GetEngineStat("m")->num_preemptions, 0);
  for (std::thread& provider : providers) provider.join();
}

TEST_F(TokenMaskTest, AFailingProviderEndsItsOwnRequest) {
  InstallAndStart(SmallConfig());
  const StartedRequest other = Start({4, 5}, Greedy(100));
  const auto fail_at = [](int32_t call, auto action) {
    return std::make_shared<FunctionMask>(
        [call, action, calls = 0](FunctionMask& mask, int32_t) mutable {
          calls++ == call ? action(mask) : mask.PublishEvery(1);
        });
  };
  const auto fail = [](FunctionMask& mask) { mask.Fail("the grammar broke"); };
  const auto raise = [](FunctionMask&) { throw std::runtime_error("provider threw"); };
  const auto raise_int = [](FunctionMask&) { throw 7; };
  const auto fail_late = [](FunctionMask& mask) {
    mask.PublishEvery(1);
    mask.Fail("the provider died");
  };
  for (const int32_t call : {0, 3}) {
    const auto tokens = static_cast<size_t>(call);
    EXPECT_EQ(RunGuided(fail_at(call, fail), FinishReason::kError, "grammar broke").size(), tokens);
    EXPECT_EQ(RunGuided(fail_at(call, raise), FinishReason::kError, "provider threw").size(),
              tokens);
    EXPECT_EQ(RunGuided(fail_at(call, raise_int), FinishReason::kError, "exception").size(),
              tokens);
    EXPECT_EQ(RunGuided(fail_at(call, fail_late), FinishReason::kError, "died").size(), tokens);
  }
  EXPECT_EQ(ReadAll(*other.queue), Run({4, 5}, Greedy(100)));
}

TEST_F(TokenMaskTest, FinishesAndRunsOutOfTokens) {
  InstallAndStart(SmallConfig());
  auto finishing = std::make_shared<FunctionMask>([n = 0](FunctionMask& mask, int32_t) mutable {
    n++ == 4 ? mask.Finish() : mask.PublishEvery(1);
  });
  EXPECT_EQ(RunGuided(finishing, FinishReason::kStop).size(), 4u);
  const auto nothing = [](FunctionMask& mask, int32_t) { mask.PublishEvery(1 << 20, 1); };
  EXPECT_EQ(RunGuided(std::make_shared<FunctionMask>(nothing), FinishReason::kError,
                      "no token that the mask allows has a finite logit at position 3")
                .size(),
            0u);
  // EOS is masked below min_length, whatever the request's token mask allows.
  GenerationConfig config = Greedy(6);
  config.eos_token_id = 5;
  config.min_length = 8;
  const auto only_eos = [](FunctionMask& mask, int32_t) { mask.PublishEvery(1 << 20, -5); };
  RunGuided(std::make_shared<FunctionMask>(only_eos), FinishReason::kError, "mask", config);
  config.min_length = 0;
  EXPECT_EQ(RunGuided(std::make_shared<FunctionMask>(only_eos), FinishReason::kStop, "", config),
            Ids{5});
}

TEST_F(TokenMaskTest, OneMaskServesOneRequest) {
  InstallAndStart(SmallConfig());
  auto mask = ThirdsMask();
  RunGuided(mask, FinishReason::kLength);
  const Status again = engine_->StartRequest("m", Ids{1}, Greedy(1), mask).status();
  EXPECT_EQ(again.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(again.message().find("another request"), std::string::npos);
  EXPECT_EQ(mask->num_ends(), 1);
  // If a request is refused for its input, its mask gets no end; if the model refuses it, the mask
  // gets its end.
  auto unused = ThirdsMask();
  EXPECT_FALSE(engine_->StartRequest("m", Ids{}, Greedy(1), unused).ok());
  EXPECT_EQ(unused->num_ends(), 0);
  ASSERT_OK(engine_->StopModel("m"));
  EXPECT_FALSE(engine_->StartRequest("m", Ids{1}, Greedy(1), unused).ok());
  EXPECT_EQ(unused->num_ends(), 1);
}

// Never answers beyond its first masks.
std::shared_ptr<FunctionMask> HangingMask(int num_answers) {
  return std::make_shared<FunctionMask>([=, n = 0](FunctionMask& mask, int32_t) mutable {
    if (n++ < num_answers) mask.PublishEvery(1);
  });
}

TEST_F(TokenMaskTest, AHangingProviderIsBoundedAndStoppable) {
  RuntimeConfig config = SmallConfig();
  config.token_mask_timeout_ms = 50;
  InstallAndStart(config);
  const StartedRequest other = Start({4, 5}, Greedy(100));
  EXPECT_EQ(
      RunGuided(HangingMask(2), FinishReason::kError, "token_mask_timeout_ms, which is 50").size(),
      2u);
  EXPECT_EQ(ReadAll(*other.queue).size(), 100u);
  ASSERT_OK(engine_->StopModel("m"));
  ASSERT_OK(engine_->ReleaseModel("m"));

  config.token_mask_timeout_ms = 1000000;
  InstallAndStart(config);
  StartedRequest request = StartGuided({1, 2, 3}, Greedy(6), HangingMask(1));
  ASSERT_TRUE(request.queue->Get().has_value());
  ASSERT_OK(engine_->StopRequest("m", request.handle));
  ReadAll(*request.queue);
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kCancelled);

  request = StartGuided({1, 2, 3}, Greedy(6), HangingMask(1));
  ASSERT_TRUE(request.queue->Get().has_value());
  ASSERT_OK(engine_->StopModel("m", StopMode::kDrain, 20));
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kCancelled);
}

// A step must not wait for a late mask: all other requests would wait too.
TEST_F(TokenMaskTest, ALateMaskHoldsBackItsOwnRequestAlone) {
  RuntimeConfig config = SmallConfig();
  config.token_mask_timeout_ms = 1000000;
  InstallAndStart(config);
  const Ids guided_alone = ReadAll(*StartGuided({1, 2, 3}, Hot(7), ThirdsMask()).queue);
  const Ids other_alone = ReadAll(*StartGuided({4, 5}, Hot(8, 100), nullptr).queue);
  // The first mask, or a later one, comes only after another request has run from start to end.
  for (const int late_call : {0, 5}) {
    SCOPED_TRACE(late_call);
    std::promise<std::pair<FunctionMask*, int32_t>> asked;
    auto mask = std::make_shared<FunctionMask>(
        [&asked, late_call, call = 0](FunctionMask& m, int32_t token) mutable {
          if (call++ == late_call) return asked.set_value({&m, token});
          m.PublishEvery(3, token + 1);
        });
    const StartedRequest guided = StartGuided({1, 2, 3}, Hot(7), mask);
    const auto [late, token] = asked.get_future().get();
    EXPECT_EQ(ReadAll(*StartGuided({4, 5}, Hot(8, 100), nullptr).queue), other_alone);
    EXPECT_EQ(guided.queue->GeneratedLength(), late_call);
    late->PublishEvery(3, token + 1);
    EXPECT_EQ(ReadAll(*guided.queue), guided_alone);
  }
}

TEST_F(TokenMaskTest, HeldRequestsEndAsOthersDo) {
  RuntimeConfig config = SmallConfig();
  config.token_mask_timeout_ms = 1000000;
  InstallAndStart(config);
  const StartedRequest other = Start({4, 5}, Greedy(200));
  GenerationConfig with_deadline = Greedy(6);
  with_deadline.timeout_ms = 30;
  const StartedRequest expires = StartGuided({1, 2, 3}, with_deadline, HangingMask(1));
  const StartedRequest stopped = StartGuided({1, 2, 3}, Greedy(6), HangingMask(1));
  ASSERT_TRUE(stopped.queue->Get().has_value());
  ASSERT_OK(engine_->StopRequest("m", stopped.handle));
  ReadAll(*stopped.queue);
  EXPECT_EQ(stopped.queue->finish_reason(), FinishReason::kCancelled);
  ReadAll(*expires.queue);
  EXPECT_EQ(expires.queue->finish_reason(), FinishReason::kDeadline);
  EXPECT_EQ(ReadAll(*other.queue).size(), 200u);

  std::promise<FunctionMask*> asked;
  const auto answer_second_later = [&asked, n = 0](FunctionMask& mask, int32_t) mutable {
    n++ == 0 ? mask.PublishEvery(1) : asked.set_value(&mask);
  };
  auto mask = std::make_shared<FunctionMask>(answer_second_later);
  const StartedRequest fails = StartGuided({1, 2, 3}, Greedy(6), mask);
  const StartedRequest next = Start({4, 5}, Greedy(200));
  FunctionMask* late = asked.get_future().get();
  const auto first = next.queue->Get();  // of one step, or of several
  ASSERT_TRUE(first.has_value());
  late->Fail("too late");
  ReadAll(*fails.queue);
  EXPECT_EQ(fails.queue->finish_reason(), FinishReason::kError);
  EXPECT_EQ(first->ids_from_generate.size() + ReadAll(*next.queue).size(), 200u);
}

class TokenMaskMemoryFaultTest : public TokenMaskTest {};

// The text of its error is the only memory that the end of a held request takes on the step thread.
TEST_F(TokenMaskMemoryFaultTest, HeldRequestsEnd) {
  if (!CanInjectFailures()) GTEST_SKIP() << "a sanitizer owns malloc";
  RuntimeConfig config = SmallConfig();
  config.engine_max_length = 1 << 14;  // so that another request runs long enough
  config.token_mask_timeout_ms = 50;
  HeapFaults step_heap;
  Install(config);
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    if (event.phase == StepPhase::kLoopBegin) step_heap.Enter();
  });
  ASSERT_OK(engine_->StartModel("m"));
  // Each has one token, and is held then. There is no memory from the moment in which both are: one
  // of them ends after it, however late this thread is.
  std::promise<void> are_held;
  int num_held = 0;
  const auto make_mask = [&] {
    return std::make_shared<FunctionMask>([&, n = 0](FunctionMask& mask, int32_t) mutable {
      if (n++ == 0) return mask.PublishEvery(1);
      if (++num_held < 2) return;
      are_held.set_value();
      step_heap.FailNth(1, /*sticky=*/true);
    });
  };
  const auto failing = make_mask(), silent = make_mask();
  const StartedRequest other = Start({4, 5}, Greedy(16000));
  const StartedRequest fails = StartGuided({1, 2, 3}, Greedy(6), failing);
  const StartedRequest expires = StartGuided({1, 2, 3}, Greedy(6), silent);
  are_held.get_future().wait();
  failing->Fail("an error whose text a short string has no room for");
  for (const StartedRequest& request : {fails, expires}) {
    EXPECT_EQ(ReadAll(*request.queue).size(), 1u);
    EXPECT_EQ(request.queue->finish_reason(), FinishReason::kError);
    EXPECT_FALSE(request.queue->error().empty());
  }
  EXPECT_GT(step_heap.num_refused(), 0);
  step_heap.FailNth(0);
  EXPECT_EQ(ReadAll(*other.queue).size(), 16000u);
  ASSERT_OK(engine_->StopModel("m"));
}

// A request that waits for the blocks of held requests is not refused as too large for the cache.
TEST_F(TokenMaskTest, WhoeverFitsRunsBesideHeldRequests) {
  RuntimeConfig config = SmallConfig();
  config.token_mask_timeout_ms = 1000000;
  config.num_blocks = 16;  // one request of 256 tokens
  InstallAndStart(config);
  std::promise<FunctionMask*> asked;
  auto mask = std::make_shared<FunctionMask>([&asked, n = 0](FunctionMask& m, int32_t) mutable {
    n++ == 0 ? asked.set_value(&m) : m.PublishEvery(1);
  });
  const Ids long_prompt = RandomPrompt(rng_, 200, vocab_size_);
  const StartedRequest held = StartGuided(long_prompt, Greedy(6), mask);
  FunctionMask* late = asked.get_future().get();
  const StartedRequest waits = Start(RandomPrompt(rng_, 180, vocab_size_), Greedy(6));
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(waits.queue->finish_reason(), FinishReason::kNone);
  late->PublishEvery(1);
  EXPECT_EQ(ReadAll(*held.queue).size(), 6u) << held.queue->error();
  EXPECT_EQ(ReadAll(*waits.queue).size(), 6u) << waits.queue->error();
}

// Nor does a prompt that has begun fail where it must wait for these blocks.
TEST_F(TokenMaskTest, APrefillWaitsForBlocksOfAHeldRequest) {
  RuntimeConfig config = SmallConfig();
  config.token_mask_timeout_ms = 1000000;
  config.num_blocks = 16;                // one request of 256 tokens
  config.engine_max_prefill_length = 4;  // so that the prompt is still short when blocks are
  Install(config);
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  std::promise<FunctionMask*> asked;
  auto mask = std::make_shared<FunctionMask>([&asked, n = 0](FunctionMask& m, int32_t) mutable {
    n++ == 100 ? asked.set_value(&m) : m.PublishEvery(1);
  });
  const StartedRequest held = StartGuided({1, 2, 3}, Greedy(150), mask);
  const StartedRequest waits = Start(RandomPrompt(rng_, 200, vocab_size_), Greedy(6));
  hook_.loop_gate.Open();
  FunctionMask* late = asked.get_future().get();
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(waits.queue->finish_reason(), FinishReason::kNone) << waits.queue->error();
  late->PublishEvery(1);
  EXPECT_EQ(ReadAll(*held.queue).size(), 150u) << held.queue->error();
  EXPECT_EQ(ReadAll(*waits.queue).size(), 6u) << waits.queue->error();
}

}  // namespace
}  // namespace allspark::testing
