// The life of a request: checks at its start, every way to end, and what its queue gives at which
// time.

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "cpp/engine/engine_harness.h"

namespace allspark::testing {
namespace {

TEST_F(EngineTest, DeliversEveryTokenOnceWithItsStatus) {
  InstallAndStart(SmallConfig());
  const StartedRequest request = Start({1, 2, 3}, Greedy(5));
  const Ids ids = ReadAll(*request.queue);
  EXPECT_EQ(ids.size(), 5u);
  EXPECT_EQ(request.queue->GenerateStatus(), GenerateRequestStatus::kGenerateFinished);
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kLength);
  EXPECT_EQ(request.queue->GeneratedLength(), 5u);
  EXPECT_FALSE((request.queue->Get()).has_value());
  EXPECT_FALSE((request.queue->Get(10)).has_value());
  EXPECT_FALSE((request.queue->GetNoWait()).has_value());
  const auto info = request.queue->RequestStatInfo();
  EXPECT_EQ(info.at("context_token_length"), 3);
  EXPECT_EQ(info.at("generated_token_length"), 5);
  EXPECT_GE(info.at("last_token_time"), info.at("first_token_time"));
  EXPECT_GE(info.at("first_token_time"), info.at("arrival_time"));
  EXPECT_EQ(info.at("draft_token_length"), 0);
  EXPECT_EQ(info.size(), 13u);
}

TEST_F(EngineTest, GettersReturnNothingWhileNothingIsNew) {
  InstallAndStart(SmallConfig());
  GateSteps();
  gate_.Close();
  const StartedRequest request = Start({1, 2, 3}, Greedy(5));
  gate_.WaitArrived();
  EXPECT_EQ(request.queue->GenerateStatus(), GenerateRequestStatus::kInit);
  EXPECT_FALSE((request.queue->GetNoWait()).has_value());
  EXPECT_FALSE((request.queue->Get(0)).has_value());
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE((request.queue->Get(30)).has_value());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(30));
  gate_.Open();
  EXPECT_EQ(ReadAll(*request.queue).size(), 5u);
}

TEST_F(EngineTest, RefusesBadInputNamingFieldValueAndBound) {
  InstallAndStart(SmallConfig());
  struct Case {
    Ids prompt;
    std::function<void(GenerationConfig&)> change;
    AsStatus status;
    std::vector<std::string> words;
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto none = [](GenerationConfig&) {};
  const std::vector<Case> cases = {
      {{}, none, AsStatus::kExceedLimitError, {"input_ids", "empty"}},
      {{1, -2}, none, AsStatus::kParamError, {"input_ids[1]", "-2"}},
      {{vocab_size_}, none, AsStatus::kParamError, {"input_ids[0]", std::to_string(vocab_size_)}},
      {{int64_t{1} << 40}, none, AsStatus::kParamError, {"input_ids[0]"}},
      {Ids(256, 1), none, AsStatus::kExceedLimitError, {"256", "max_length"}},
      {{1, 2, 3},
       [](auto& c) { c.max_length = 3; },
       AsStatus::kExceedLimitError,
       {"max_length", "3"}},
      {{1},
       [](auto& c) { c.max_length = 257; },
       AsStatus::kExceedLimitError,
       {"max_length", "257", "256"}},
      {{1}, [](auto& c) { c.max_length = -1; }, AsStatus::kParamError, {"max_length", "-1"}},
      {{1}, [](auto& c) { c.top_p = 1.5; }, AsStatus::kParamError, {"top_p", "1.5", "1"}},
      {{1}, [nan](auto& c) { c.top_p = nan; }, AsStatus::kParamError, {"top_p", "nan"}},
      {{1}, [](auto& c) { c.temperature = -0.5; }, AsStatus::kParamError, {"temperature", "-0.5"}},
      {{1}, [](auto& c) { c.top_k = -1; }, AsStatus::kParamError, {"top_k", "-1"}},
      {{1}, [](auto& c) { c.seed = -2; }, AsStatus::kParamError, {"seed", "-2"}},
      {{1},
       [&](auto& c) { c.eos_token_id = vocab_size_; },
       AsStatus::kParamError,
       {"eos_token_id"}},
      {{1},
       [](auto& c) { c.stop_words_ids = {{1}, {}}; },
       AsStatus::kParamError,
       {"stop_words_ids"}},
      {{1},
       [&](auto& c) { c.stop_words_ids = {{1, vocab_size_}}; },
       AsStatus::kParamError,
       {"stop_words_ids[0]"}},
      {{1}, [](auto& c) { c.min_length = 100; }, AsStatus::kParamError, {"min_length", "100"}},
  };
  for (const Case& c : cases) {
    GenerationConfig config = Greedy(4);
    c.change(config);
    const Status status = engine_->StartRequest("m", c.prompt, config).status();
    EXPECT_EQ(status.as_status(), c.status) << status.ToString();
    for (const std::string& word : c.words) {
      EXPECT_NE(status.message().find(word), std::string::npos) << word << ": " << status.message();
    }
  }
  EXPECT_EQ(engine_->GetEngineStat("m")->num_steps, 0) << "bad input reached a step";
}

TEST_F(EngineTest, EndsAtEosStopWordsAndLengths) {
  InstallAndStart(SmallConfig());
  const Ids prompt = {9, 8, 7};
  const Ids free_run = Run(prompt, Greedy(40));
  ASSERT_EQ(free_run.size(), 40u);
  const auto first = [&](int64_t id) {
    return static_cast<size_t>(std::find(free_run.begin(), free_run.end(), id) - free_run.begin());
  };
  const int64_t eos = free_run[6];

  GenerationConfig config = Greedy(40);
  config.eos_token_id = eos;
  StartedRequest request = Start(prompt, config);
  Ids ids = ReadAll(*request.queue);
  EXPECT_EQ(ids.size(), first(eos) + 1);  // the EOS token is part of the output
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kStop);

  config.early_stopping = false;
  EXPECT_EQ(Run(prompt, config), free_run);

  config = Greedy(40);
  config.stop_words_ids = {{free_run[3], free_run[4], free_run[5]}, {free_run[39]}};
  request = Start(prompt, config);
  ids = ReadAll(*request.queue);
  EXPECT_LE(ids.size(), 6u);
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kStop);
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), free_run.begin()));

  // A stop word that lies partly in the prompt does not count.
  config.stop_words_ids = {{prompt.back(), free_run[0]}};
  EXPECT_EQ(Run(prompt, config), free_run);

  config = Greedy(0);
  config.max_length = 10;
  request = Start(prompt, config);
  EXPECT_EQ(ReadAll(*request.queue).size(), 7u);
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kLength);
  config.max_length = 0;  // the engine's
  EXPECT_EQ(Run(prompt, config).size(), 253u);
}

TEST_F(EngineTest, OfManyWordsTheFirstToEndCounts) {
  InstallAndStart(SmallConfig());
  const Ids prompt = {9, 8, 7};
  const Ids free_run = Run(prompt, Greedy(40));
  for (int round = 0; round < 50; ++round) {
    GenerationConfig config = Greedy(40);
    size_t expected = free_run.size();
    for (int i = 0; i < 20; ++i) {
      // A part of the output, or one that differs at its end or begins before the output.
      const size_t begin = rng_() % 35;
      const size_t size = 2 + rng_() % 4;
      Ids word(free_run.begin() + static_cast<int64_t>(begin),
               free_run.begin() + static_cast<int64_t>(begin + size));
      if (i % 4 > 0) word.back() = static_cast<int64_t>(rng_() % 50);
      if (i % 7 == 0) word = {prompt.back(), free_run[0], free_run[1]};
      config.stop_words_ids.push_back(word);
      const auto found = std::search(free_run.begin(), free_run.end(), word.begin(), word.end());
      if (found != free_run.end()) {
        expected = std::min(expected, static_cast<size_t>(found - free_run.begin()) + word.size());
      }
    }
    EXPECT_EQ(Run(prompt, config),
              Ids(free_run.begin(), free_run.begin() + static_cast<int64_t>(expected)));
    // As bad words, none of these words is completed, whether it begins in the prompt or not.
    config.bad_words_ids = std::exchange(config.stop_words_ids, {});
    Ids tokens = Run(prompt, config);
    EXPECT_EQ(tokens.size(), 40u);
    tokens.insert(tokens.begin(), prompt.begin(), prompt.end());
    for (const auto& word : config.bad_words_ids) {
      EXPECT_EQ(std::search(tokens.begin(), tokens.end(), word.begin(), word.end()), tokens.end());
    }
  }
}

TEST_F(EngineTest, StopTokensAndIgnoredEos) {
  InstallAndStart(SmallConfig());
  const Ids prompt = {9, 8, 7};
  const Ids free_run = Run(prompt, Greedy(40));
  GenerationConfig config = Greedy(40);
  config.stop_token_ids = {free_run[39], free_run[6]};
  const StartedRequest request = Start(prompt, config);
  const Ids ids = ReadAll(*request.queue);
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), free_run.begin()));
  EXPECT_TRUE(ids.back() == free_run[39] || ids.back() == free_run[6]);
  EXPECT_LE(ids.size(), 7u);
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kStop);

  config = Greedy(40);
  config.eos_token_id = free_run[6];
  config.ignore_eos = true;
  EXPECT_EQ(Run(prompt, config), free_run);
}

TEST_F(EngineTest, MinNewTokensHoldsBackTheEnd) {
  InstallAndStart(SmallConfig());
  const Ids prompt = {9, 8, 7};
  const Ids free_run = Run(prompt, Greedy(40));
  GenerationConfig by_output = Greedy(40), by_length = Greedy(40);
  by_output.stop_token_ids = by_length.stop_token_ids = {free_run[2], free_run[4]};
  by_output.min_new_tokens = 17;
  by_length.min_length = 17 + static_cast<int64_t>(prompt.size());
  const Ids ids = Run(prompt, by_output);
  EXPECT_GE(ids.size(), 17u);
  EXPECT_EQ(Run(prompt, by_length), ids);
  by_output.min_length = 3;  // the later of the two counts
  EXPECT_EQ(Run(prompt, by_output), ids);
}

TEST_F(EngineTest, RepeatedNgramsEndTheRequest) {
  InstallAndStart(SmallConfig());
  GenerationConfig config = Greedy(100);
  config.logit_bias = {{3, 100}};  // 3 3 3 3 ...
  EXPECT_EQ(Run({1}, config), Ids(100, 3));
  config.repetition_ngram_size = 4;
  config.repetition_ngram_threshold = 3;
  const StartedRequest request = Start({3, 3, 3, 3, 3}, config);
  EXPECT_EQ(ReadAll(*request.queue), Ids(6, 3)) << "the third 3 3 3 3 of the output ends it";
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kStop);
  config.no_repeat_ngram_size = 4;  // the prompt counts here
  const Ids varied = Run({1}, config);
  EXPECT_EQ(varied.size(), 100u);
  config.repetition_ngram_threshold = 0;
  config.no_repeat_ngram_size = 0;
  EXPECT_EQ(Run({1}, config), Ids(100, 3));
}

TEST_F(EngineTest, NoTokenLeftIsAnError) {
  InstallAndStart(SmallConfig());
  GenerationConfig config = Greedy(5);
  for (int64_t id = 0; id < vocab_size_; ++id) config.bad_words_ids.push_back({id});
  const StartedRequest request = Start({1}, config);
  EXPECT_TRUE(ReadAll(*request.queue).empty());
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kError);
  EXPECT_NE(request.queue->error().find("no token"), std::string::npos);
}

TEST_F(EngineTest, MinLengthHoldsBackTheEnd) {
  InstallAndStart(SmallConfig());
  const Ids prompt = {9, 8, 7};
  const Ids free_run = Run(prompt, Greedy(40));
  GenerationConfig config = Greedy(40);
  config.eos_token_id = free_run[2];
  config.stop_words_ids = {{free_run[4]}};
  config.min_length = 20;
  const Ids ids = Run(prompt, config);
  EXPECT_GE(ids.size() + prompt.size(), 20u);
  // Neither end token may be chosen while the total length before the token is below 20.
  for (size_t i = 0; i + prompt.size() < 20 && i < ids.size(); ++i) {
    EXPECT_NE(ids[i], free_run[2]);
    EXPECT_NE(ids[i], free_run[4]);
  }
}

TEST_F(EngineTest, OneTokenOutputsReachAnEnd) {
  InstallAndStart(SmallConfig());
  const StartedRequest request = Start({1, 2}, Greedy(1));
  ASSERT_OK(engine_->SyncRequest("m", request.handle, 10000));
  EXPECT_EQ(request.queue->GenerateStatus(), GenerateRequestStatus::kGenerateFinished);
  EXPECT_EQ(ReadAll(*request.queue).size(), 1u);
}

TEST_F(EngineTest, StopBeforePrefill) {
  InstallAndStart(SmallConfig());
  GateSteps();
  gate_.Close();
  std::vector<StartedRequest> running;
  for (int i = 0; i < 8; ++i) running.push_back(Start({1}, Greedy(3)));
  gate_.WaitArrived();
  const StartedRequest waiting = Start({1, 2, 3}, Greedy(5));
  EXPECT_OK(engine_->StopRequest("m", waiting.handle));
  EXPECT_OK(engine_->StopRequest("m", waiting.handle));
  gate_.Open();
  ASSERT_OK(engine_->SyncRequest("m", waiting.handle, 10000));
  EXPECT_EQ(waiting.queue->finish_reason(), FinishReason::kCancelled);
  EXPECT_EQ(waiting.queue->GeneratedLength(), 0u);
  EXPECT_FALSE((waiting.queue->Get()).has_value());
  ASSERT_OK(engine_->SyncAllRequests("m", 10000));
  for (const auto& request : running) EXPECT_EQ(ReadAll(*request.queue).size(), 3u);
}

TEST_F(EngineTest, StopDuringPrefill) {
  InstallAndStart(SmallConfig());
  int begun = 0;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    // The prompt takes 7 chunks of 32; the step thread stops in the second.
    if (event.phase == StepPhase::kBegin && ++begun == 2) gate_.Pass();
  });
  gate_.Close();
  const StartedRequest request = Start(Ids(200, 3), Greedy(5));
  gate_.WaitArrived();
  EXPECT_OK(engine_->StopRequest("m", request.handle));
  gate_.Open();
  ASSERT_OK(engine_->SyncRequest("m", request.handle, 10000));
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kCancelled);
  EXPECT_EQ(request.queue->GeneratedLength(), 0u);
  EXPECT_EQ(Run({1}, Greedy(2)).size(), 2u);
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
}

TEST_F(EngineTest, StopWhileGeneratingKeepsWhatIsThere) {
  InstallAndStart(SmallConfig());
  hook_.Set([](const StepEvent&) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
  const StartedRequest request = Start({1, 2, 3}, Greedy(250));
  Ids ids;
  while (ids.size() < 3) {
    const auto elements = request.queue->Get();
    ASSERT_TRUE(elements.has_value());
    ids.insert(ids.end(), elements->ids_from_generate.begin(), elements->ids_from_generate.end());
  }
  EXPECT_OK(engine_->StopRequest("m", request.handle));
  const Ids rest = ReadAll(*request.queue);
  EXPECT_EQ(ids.size() + rest.size(), request.queue->GeneratedLength());
  EXPECT_OK(engine_->StopRequest("m", request.handle));  // stopping an ended request is fine
}

TEST_F(EngineTest, ReleaseWhileRunningAndReadAfterwards) {
  InstallAndStart(SmallConfig());
  int begun = 0;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    if (event.phase == StepPhase::kBegin && ++begun == 5) gate_.Pass();
  });
  gate_.Close();
  const StartedRequest request = Start({1, 2, 3}, Greedy(250));
  gate_.WaitArrived();
  EXPECT_OK(engine_->ReleaseRequest("m", request.handle));
  gate_.Open();
  EXPECT_EQ(engine_->ReleaseRequest("m", request.handle).as_status(), AsStatus::kIllegalRequestId);
  EXPECT_EQ(engine_->SyncRequest("m", request.handle).as_status(), AsStatus::kIllegalRequestId);
  ReadAll(*request.queue);
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kCancelled);
  ASSERT_OK(engine_->StopModel("m"));
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
}

TEST_F(EngineTest, AnExceptionInAStepEndsItsRequestsOnly) {
  InstallAndStart(SmallConfig());
  const Ids expected = Run({4, 5}, Greedy(6));
  for (StepPhase phase : {StepPhase::kBegin, StepPhase::kLogits, StepPhase::kEnd}) {
    int seen = 0;
    const HookGuard guard(hook_);
    hook_.Set([&](const StepEvent& event) {
      if (event.phase == phase && ++seen == 3) throw std::runtime_error("injected");
    });
    const StartedRequest request = Start({1, 2, 3}, Greedy(50));
    ASSERT_OK(engine_->SyncRequest("m", request.handle, 10000));
    EXPECT_EQ(request.queue->GenerateStatus(), GenerateRequestStatus::kInternalError);
    EXPECT_EQ(request.queue->finish_reason(), FinishReason::kError);
    EXPECT_NE(request.queue->error().find("injected"), std::string::npos);
    EXPECT_LE(ReadAll(*request.queue).size(), 3u);
    EXPECT_OK(engine_->ReleaseRequest("m", request.handle));
    EXPECT_EQ(Run({4, 5}, Greedy(6)), expected) << "the engine goes on";
    EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
  }
  // The request is released before the step in which both its end and the exception occur.
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    if (event.phase == StepPhase::kEnd) throw std::runtime_error("injected");
  });
  const StartedRequest last = Start({1, 2}, Greedy(1));
  EXPECT_OK(engine_->ReleaseRequest("m", last.handle));
  ReadAll(*last.queue);
}

TEST_F(EngineTest, SyncTimesOutAndNamesTheRequest) {
  InstallAndStart(SmallConfig());
  GateSteps();
  gate_.Close();
  const StartedRequest request = Start({1}, Greedy(3));
  const std::string unfinished =
      "sync_request: request " + std::to_string(request.handle.id) + " has not ended";
  int num_asked = 0;
  const auto cancelled = [&] { return ++num_asked == 2; };
  for (const auto& sync : std::vector<std::function<Status(int64_t, std::function<bool()>)>>{
           [&](int64_t ms, const auto& stop) {
             return engine_->SyncRequest("m", request.handle, ms, stop);
           },
           [&](int64_t ms, const auto& stop) {
             const std::vector<RequestHandle> twice(2, request.handle);
             return engine_->SyncRequests("m", twice, ms, stop);
           },
           [&](int64_t ms, const auto& stop) { return engine_->SyncAllRequests("m", ms, stop); }}) {
    for (const std::function<bool()>& stop :
         {std::function<bool()>(), std::function([] { return false; })}) {
      const Status status = sync(120, stop);  // more than the interval between two checks
      EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
      EXPECT_EQ(status.message(), unfinished + " within 120 ms");
    }
    // The longest possible times, also in the clock's unit.
    for (const int64_t ms :
         {int64_t{-1}, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()}) {
      num_asked = 0;
      const Status status = sync(ms, cancelled);
      EXPECT_EQ(status.code(), StatusCode::kCancelled);
      EXPECT_EQ(status.message(), unfinished + "; the caller gave up");
      EXPECT_EQ(num_asked, 2);
    }
  }
  gate_.Open();
  EXPECT_OK(engine_->SyncAllRequests("m", 10000));
}

TEST_F(EngineTest, SyncOfAListGoesOnAfterAnUnknownHandle) {
  InstallAndStart(SmallConfig());
  const StartedRequest request = Start({1}, Greedy(200));
  const std::vector<RequestHandle> handles = {RequestHandle{999'999}, request.handle};
  EXPECT_EQ(engine_->SyncRequests("m", handles).as_status(), AsStatus::kIllegalRequestId);
  EXPECT_OK(engine_->SyncRequest("m", request.handle, 0));  // it has ended
  EXPECT_OK(engine_->SyncRequests("m", {}));
  EXPECT_OK(engine_->ReleaseRequest("m", request.handle));
}

TEST_F(EngineTest, DeniesWhatExceedsTheWaitingBound) {
  RuntimeConfig config = SmallConfig();
  config.engine_max_batch = 2;
  config.max_waiting_requests = 3;
  InstallAndStart(config);
  GateSteps();
  gate_.Close();
  std::vector<StartedRequest> accepted;
  for (int i = 0; i < 5; ++i) accepted.push_back(Start({1}, Greedy(3)));
  const Status denied = engine_->StartRequest("m", Ids{1}, Greedy(3)).status();
  EXPECT_EQ(denied.as_status(), AsStatus::kRequestDenied);
  EXPECT_NE(denied.message().find("max_waiting_requests"), std::string::npos);
  gate_.Open();
  for (const auto& request : accepted) EXPECT_EQ(ReadAll(*request.queue).size(), 3u);
  EXPECT_EQ(Run({1}, Greedy(3)).size(), 3u);
}

TEST_F(EngineTest, SampledTokensDependOnSeedAlone) {
  InstallAndStart(SmallConfig());
  GenerationConfig config;
  config.max_new_tokens = 30;
  config.top_k = 0;
  config.temperature = 1.5;
  config.seed = 42;
  const Ids alone = Run({1, 2, 3}, config);
  EXPECT_EQ(Run({1, 2, 3}, config), alone);
  config.seed = 43;
  EXPECT_NE(Run({1, 2, 3}, config), alone);
  config.seed = 42;
  std::vector<StartedRequest> crowd;
  for (int i = 0; i < 7; ++i)
    crowd.push_back(Start(RandomPrompt(rng_, 20 + i, vocab_size_), Greedy(40)));
  EXPECT_EQ(Run({1, 2, 3}, config), alone);
  // Without a seed, two requests differ.
  config.seed = -1;
  EXPECT_NE(Run({1, 2, 3}, config), Run({1, 2, 3}, config));
}

TEST_F(EngineTest, TheCompletionSetNamesEveryChangedQueueOnce) {
  InstallAndStart(SmallConfig());
  const auto& completions = engine_->completions();
  EXPECT_FALSE(Readable(completions->fd()));
  const StartedRequest a = Start({1}, Greedy(3));
  const StartedRequest b = Start({2}, Greedy(3));
  ASSERT_OK(engine_->SyncAllRequests("m"));
  // The announcement comes after the status, so poll until both are there.
  std::map<uint64_t, int> seen;
  pollfd p{.fd = completions->fd(), .events = POLLIN, .revents = 0};
  while (seen.size() < 2) {
    ASSERT_EQ(poll(&p, 1, 10000), 1);
    for (const auto& queue : completions->Drain()) ++seen[queue->request_id()];
  }
  EXPECT_TRUE(seen.contains(a.handle.id));
  EXPECT_TRUE(seen.contains(b.handle.id));
  ASSERT_OK(engine_->StopModel("m"));
  completions->Drain();
  EXPECT_FALSE(Readable(completions->fd()));
  EXPECT_TRUE(completions->Drain().empty());
}

TEST_F(EngineTest, AnAttachedSetHearsOfItsQueuesAlone) {
  InstallAndStart(SmallConfig());
  const auto set = CompletionSet::Create();
  const StartedRequest a = Start({1}, Greedy(3));
  const StartedRequest b = Start({2}, Greedy(3));
  ASSERT_OK(engine_->SyncAllRequests("m"));
  set->Attach(a.queue);  // already has something to read: signalled at once
  EXPECT_TRUE(Readable(set->fd()));
  const auto changed = set->Drain();
  ASSERT_EQ(changed.size(), 1u);
  EXPECT_EQ(changed[0]->request_id(), a.handle.id);
  EXPECT_FALSE(Readable(set->fd()));
  // A queue that is destroyed leaves its sets.
  StartedRequest c = Start({3}, Greedy(1));
  set->Attach(c.queue);
  ASSERT_OK(engine_->SyncRequest("m", c.handle));
  ASSERT_OK(engine_->ReleaseRequest("m", c.handle));
  ASSERT_OK(engine_->StopModel("m"));
  c.queue.reset();
  EXPECT_TRUE(set->Drain().empty());
}

TEST_F(EngineTest, ASetThatIsAttachedForTheEndHearsNoTokens) {
  InstallAndStart(SmallConfig());
  const auto set = CompletionSet::Create();
  const StartedRequest a = Start({1}, Greedy(60));
  set->Attach(a.queue, /*only_end=*/true);
  while (!Readable(set->fd())) std::this_thread::yield();
  EXPECT_EQ(a.queue->GenerateStatus(), GenerateRequestStatus::kGenerateFinished);
  EXPECT_EQ(a.queue->GeneratedLength(), 60);
  const auto changed = set->Drain();
  ASSERT_EQ(changed.size(), 1u);
  EXPECT_EQ(changed[0]->request_id(), a.handle.id);
  // Of a queue that has ended, it is signalled at once.
  set->Attach(a.queue, /*only_end=*/true);
  EXPECT_TRUE(Readable(set->fd()));
  EXPECT_EQ(set->Drain().size(), 1u);
}

}  // namespace
}  // namespace allspark::testing
