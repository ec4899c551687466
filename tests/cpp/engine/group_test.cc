// Groups: beam searches and best_of. tests/python/test_beam_search.py compares their outputs with
// transformers; the tests here compare outputs under load with outputs alone, and check how groups
// end.

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "cpp/engine/engine_harness.h"
#include "cpp/engine/function_mask.h"

namespace allspark::testing {
namespace {

struct Sequence {
  Ids ids;
  std::vector<float> logprobs;
  std::optional<double> score;
  FinishReason reason;
  bool operator==(const Sequence&) const = default;
};

Sequence Read(ResultQueue& queue) {
  Sequence sequence;
  while (auto elements = queue.Get()) {
    sequence.ids.insert(sequence.ids.end(), elements->ids_from_generate.begin(),
                        elements->ids_from_generate.end());
    sequence.logprobs.insert(sequence.logprobs.end(), elements->token_logprobs_list.begin(),
                             elements->token_logprobs_list.end());
  }
  sequence.score = queue.sequence_score();
  sequence.reason = queue.finish_reason();
  return sequence;
}

std::vector<Sequence> ReadGroup(const StartedRequest& request) {
  std::vector<Sequence> sequences{Read(*request.queue)};
  for (const StartedRequest& next : request.next_best) sequences.push_back(Read(*next.queue));
  return sequences;
}

GenerationConfig Beams(int64_t num_beams, int64_t max_new_tokens) {
  GenerationConfig config = Greedy(max_new_tokens);
  config.num_beams = config.num_return_sequences = num_beams;
  config.logprobs = true;
  return config;
}

GenerationConfig BestOf(int64_t best_of, int64_t max_new_tokens) {
  GenerationConfig config;
  config.best_of = config.num_return_sequences = best_of;
  config.max_new_tokens = max_new_tokens;
  config.seed = 5;
  config.logprobs = true;
  return config;
}

// Beam searches, samples and other requests, with stop conditions and penalties.
GenerationConfig RandomConfig(std::mt19937& rng, int64_t vocab_size) {
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(rng() % static_cast<uint64_t>(n));
  };
  const int64_t max_new_tokens = 1 + below(90);
  const int64_t kind = below(3);
  GenerationConfig config = kind == 0   ? Beams(2 + below(5), max_new_tokens)
                            : kind == 1 ? BestOf(2 + below(5), max_new_tokens)
                                        : Greedy(max_new_tokens);
  config.length_penalty = static_cast<double>(below(5)) - 2;
  config.beam_early_stopping = static_cast<EarlyStopping>(rng() % 3);
  for (int64_t i = below(3) == 0 ? below(8) : 0; i > 0; --i)
    config.stop_token_ids.push_back(below(vocab_size));
  if (below(2) == 0) config.stop_words_ids = {{below(vocab_size), below(vocab_size)}};
  if (below(2) == 0) config.repetition_penalty = 1.3;
  if (below(2) == 0) config.frequency_penalty = 0.5;
  if (below(2) == 0) config.top_logprobs = config.logprobs ? 3 : 0;
  config.priority = below(3);
  return config;
}

class GroupTest : public EngineTest {
 protected:
  void ExpectNothingLeft() {
    const EngineStat stat = *engine_->GetEngineStat("m");
    EXPECT_EQ(stat.used_blocks, 0);
    EXPECT_EQ(stat.running_request, 0);
    EXPECT_EQ(stat.pending_request, 0);
  }
};

TEST_F(GroupTest, TokensThatEndABeamAreBounded) {
  proto::DecoderSpec spec = TinyLlamaSpec();
  spec.set_vocab_size(300);
  Install(SmallConfig(), spec);
  ASSERT_OK(engine_->StartModel("m"));
  GenerationConfig beams = Beams(3, 5);
  for (int64_t i = 0; i < 300; ++i) {
    if (i < 200) beams.stop_token_ids.push_back(i);
    beams.stop_words_ids.push_back({i, i % 256});  // most are stop tokens
  }
  EXPECT_OK(engine_->StartRequest("m", Ids{1}, beams).status());
  beams.stop_words_ids.push_back({1, 256});
  beams.stop_words_ids.push_back({2, 256});
  const Status status = engine_->StartRequest("m", Ids{1}, beams).status();
  EXPECT_EQ(status.as_status(), AsStatus::kParamError);
  EXPECT_EQ(status.message(),
            "stop_words_ids, stop_token_ids and eos_token_id have 257 different last tokens; the "
            "bound is 256 where num_beams is 3");
  beams.num_beams = beams.num_return_sequences = 1;
  EXPECT_OK(engine_->StartRequest("m", Ids{1}, beams).status());
}

class GroupNumericsTest : public GroupTest, public ::testing::WithParamInterface<CacheMode> {};

TEST_P(GroupNumericsTest, BitsAreTheSameAloneAndInAPreemptedCrowd) {
  std::vector<std::pair<Ids, GenerationConfig>> jobs;
  RuntimeConfig alone_config = SmallConfig();
  alone_config.cache_mode = GetParam();
  InstallAndStart(alone_config);
  for (int i = 0; i < 40; ++i) {
    Ids prompt = RandomPrompt(rng_, 1 + i * 7 % 40, vocab_size_);
    jobs.emplace_back(std::move(prompt), RandomConfig(rng_, vocab_size_));
  }
  std::vector<std::vector<Sequence>> alone;
  for (const auto& [prompt, config] : jobs) alone.push_back(ReadGroup(Start(prompt, config)));
  ExpectNothingLeft();
  int64_t preemptions = 0;
  const std::vector<std::pair<int64_t, int64_t>> runs{{32, 2}, {5, 1}, {100, 2}};
  for (const auto& [chunk, threads] : runs) {
    RuntimeConfig config = SmallConfig("crowd");
    config.cache_mode = GetParam();
    config.engine_max_prefill_length = chunk;
    config.num_threads = threads;
    config.engine_max_batch = 16;
    config.num_blocks = 32;
    hook_.loop_gate.Close();
    InstallAndStart(config);
    std::vector<StartedRequest> requests;
    for (const auto& [prompt, generation] : jobs) {
      requests.push_back(Start(prompt, generation, "crowd"));
    }
    hook_.loop_gate.Open();
    for (size_t i = 0; i < jobs.size(); ++i) EXPECT_EQ(ReadGroup(requests[i]), alone[i]) << i;
    preemptions += engine_->GetEngineStat("crowd")->num_preemptions;
    EXPECT_EQ(engine_->GetEngineStat("crowd")->used_blocks, 0);
    ASSERT_OK(engine_->StopModel("crowd"));
    ASSERT_OK(engine_->ReleaseModel("crowd"));
  }
  EXPECT_GT(preemptions, 10);
}

INSTANTIATE_TEST_SUITE_P(Caches, GroupNumericsTest, ::testing::ValuesIn(kCacheModes),
                         [](const auto& test) { return CacheModeName(test.param); });

TEST_F(GroupTest, NothingComesBeforeTheEnd) {
  InstallAndStart(SmallConfig());
  for (const GenerationConfig& config : {Beams(3, 20), BestOf(3, 20)}) {
    int64_t steps = 0;
    const HookGuard guard(hook_);
    hook_.Set([&](const StepEvent& event) { steps += event.phase == StepPhase::kBegin; });
    const StartedRequest request = Start({1, 2, 3}, config);
    ASSERT_EQ(request.next_best.size(), 2u);
    // Every queue is signalled once, at its end; waiting for one sequence waits for the group.
    ASSERT_OK(engine_->SyncRequest("m", request.handle));
    for (const StartedRequest& next : request.next_best) {
      ASSERT_OK(engine_->SyncRequest("m", next.handle));
      EXPECT_EQ(next.queue->request_id(), next.handle.id);
    }
    EXPECT_EQ(engine_->completions()->Drain().size(), 3u);
    for (const Sequence& sequence : ReadGroup(request)) {
      EXPECT_EQ(sequence.ids.size(), 20u);
      EXPECT_EQ(sequence.logprobs.size(), 20u);
      EXPECT_EQ(sequence.reason, FinishReason::kLength);
      EXPECT_TRUE(sequence.score.has_value());
    }
    hook_.Set({});  // the step thread may be in its last call
    EXPECT_GE(steps, 20);
  }
  ExpectNothingLeft();
}

TEST_F(GroupTest, AStopAtAnyMomentEndsAllAndLeaksNothing) {
  RuntimeConfig config = SmallConfig();
  config.num_blocks = 40;
  InstallAndStart(config);
  for (int round = 0; round < 60; ++round) {
    std::vector<StartedRequest> requests;
    for (int i = 0; i < 4; ++i) {
      const int64_t count = 2 + static_cast<int64_t>(rng_() % 4);
      const int64_t length = 1 + static_cast<int64_t>(rng_() % 60);
      requests.push_back(Start(RandomPrompt(rng_, 1 + round, vocab_size_),
                               i % 2 == 0 ? Beams(count, length) : BestOf(count, length)));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(rng_() % 8000));
    for (const StartedRequest& request : requests) {
      // Any handle of the group; a release also stops it.
      const StartedRequest& one = rng_() % 2 == 0 ? request : request.next_best[0];
      if (rng_() % 2 == 0) {
        EXPECT_OK(engine_->StopRequest("m", one.handle));
      } else {
        EXPECT_OK(engine_->ReleaseRequest("m", one.handle));
      }
    }
    for (const StartedRequest& request : requests) {
      const std::vector<Sequence> sequences = ReadGroup(request);
      const bool cancelled = sequences[0].reason == FinishReason::kCancelled;
      for (const Sequence& sequence : sequences) {
        EXPECT_EQ(sequence.reason == FinishReason::kCancelled, cancelled);
        EXPECT_EQ(sequence.ids.empty(), cancelled);
      }
    }
    ASSERT_OK(engine_->SyncAllRequests("m"));
    ExpectNothingLeft();
  }
}

TEST_F(GroupTest, AFailingStepEndsTheWholeGroup) {
  InstallAndStart(SmallConfig());
  for (const GenerationConfig& config : {Beams(4, 30), BestOf(4, 30)}) {
    int64_t steps = 0;
    const HookGuard guard(hook_);
    hook_.Set([&](const StepEvent& event) {
      if (event.phase == StepPhase::kBegin && ++steps == 10) throw std::runtime_error("injected");
    });
    for (const Sequence& sequence : ReadGroup(Start({1, 2, 3}, config))) {
      EXPECT_EQ(sequence.reason, FinishReason::kError);
    }
    ExpectNothingLeft();
  }
  EXPECT_EQ(ReadGroup(Start({1, 2, 3}, Beams(4, 5)))[0].ids.size(), 5u);
}

// A search is unloaded while its beams are computed again beside decodes, a few rows at a time.
// Then some of them have candidates. It is computed a third time without decodes, so that its beams
// come in another order.
TEST_F(GroupTest, ASearchIsUnloadedWhileItIsComputedAgain) {
  RuntimeConfig config = SmallConfig();
  config.engine_max_batch = 16;
  config.engine_max_prefill_length = 64;
  config.prefill_policy = PrefillPolicy::kSmooth;
  InstallAndStart(config);
  const auto load = [&] {
    EXPECT_OK(engine_->LoadDeviceMemory("m"));
    return 0;
  };
  GenerationConfig first = Greedy(200);
  first.priority = 5;
  for (int round = 0; round < 64; ++round) {
    const Ids prompt = RandomPrompt(rng_, 10 + static_cast<int64_t>(rng_() % 6), vocab_size_);
    const std::vector<Sequence> expected = ReadGroup(Start(prompt, Beams(4, 39)));
    ASSERT_OK(engine_->UnloadDeviceMemory("m"));
    std::vector<StartedRequest> others;
    for (int64_t i = 0; i < 5; ++i) others.push_back(Start({1, 2, i}, first));
    const StartedRequest search = Start(prompt, Beams(4, 39));
    const int64_t at = 23 + static_cast<int64_t>(rng_() % 7);
    (void)UnloadInStep(at, load);
    (void)UnloadInStep(at + 26 + static_cast<int64_t>(rng_() % 16), load);
    for (const StartedRequest& other : others) {
      EXPECT_OK(engine_->StopRequest("m", other.handle));
    }
    const StartedRequest bystander = Start({4, 5, 6}, Greedy(5));
    ASSERT_OK(engine_->LoadDeviceMemory("m"));
    EXPECT_EQ(ReadGroup(search), expected) << "round " << round << ": " << search.queue->error();
    EXPECT_EQ(ReadAll(*bystander.queue).size(), 5u) << bystander.queue->error();
    ASSERT_OK(engine_->SyncAllRequests("m"));
    ExpectNothingLeft();
  }
}

// One sample runs into tokens that have no successor while others accept drafts.
TEST_F(GroupTest, ASampleEndsTheGroupWhileOthersAcceptDrafts) {
  InstallAndStart(SmallConfig());
  GenerationConfig config = BestOf(6, 120);
  config.prompt_lookup_num_tokens = 6;
  config.no_repeat_ngram_size = 60;
  config.logit_bias = {{7, 100}, {9, 95}};
  for (int64_t token = 0; token < vocab_size_; ++token) config.bad_words_ids.push_back({9, token});
  const Ids prompt = RandomPrompt(rng_, 100, vocab_size_);
  const StartedRequest other = Start({1, 2, 3}, Greedy(200));
  int64_t accepted = 0;
  for (int64_t seed = 0; seed < 20; ++seed) {
    config.seed = seed;
    const StartedRequest group = Start(prompt, config);
    for (const Sequence& sequence : ReadGroup(group)) {
      EXPECT_EQ(sequence.reason, FinishReason::kError);
    }
    EXPECT_NE(group.queue->error().find("no token has a finite logit"), std::string::npos);
    accepted = engine_->GetEngineStat("m")->total_accepted_draft_token;
  }
  EXPECT_GT(accepted, 0);
  EXPECT_EQ(ReadAll(*other.queue).size(), 200u);
}

TEST_F(GroupTest, BeamsThatOutgrowThePoolAreInterrupted) {
  RuntimeConfig config = SmallConfig();
  config.num_blocks = 16;  // one sequence of 256 tokens
  InstallAndStart(config);
  // The two later requests are still served.
  const StartedRequest large = Start(RandomPrompt(rng_, 100, vocab_size_), Beams(8, 150));
  const StartedRequest small = Start(RandomPrompt(rng_, 100, vocab_size_), Beams(4, 20));
  const StartedRequest one = Start({1, 2, 3}, Greedy(200));
  for (const Sequence& sequence : ReadGroup(large)) {
    EXPECT_EQ(sequence.reason, FinishReason::kInterrupted);
    EXPECT_TRUE(sequence.ids.empty());
  }
  for (const Sequence& sequence : ReadGroup(small)) EXPECT_EQ(sequence.ids.size(), 20u);
  EXPECT_EQ(ReadAll(*one.queue).size(), 200u);
  ExpectNothingLeft();
}

TEST_F(GroupTest, FewerTokensThanBeams) {
  InstallAndStart(SmallConfig());
  // All but two tokens are masked: there are two beams after the prompt and four after the next
  // token.
  GenerationConfig config = Beams(4, 6);
  for (int64_t token = 2; token < vocab_size_; ++token) config.bad_words_ids.push_back({token});
  std::vector<Ids> seen;
  for (const Sequence& sequence : ReadGroup(Start({1, 2, 3}, config))) {
    EXPECT_EQ(sequence.ids.size(), 6u);
    for (int64_t token : sequence.ids) EXPECT_LT(token, 2);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), sequence.ids), 0);
    seen.push_back(sequence.ids);
  }
  EXPECT_EQ(seen.size(), 4u);
  // A single allowed token gives one sequence, so no more can be returned.
  config.bad_words_ids.push_back({1});
  const StartedRequest request = Start({1, 2, 3}, config);
  EXPECT_EQ(Read(*request.queue).reason, FinishReason::kError);
  EXPECT_NE(request.queue->error().find("num_return_sequences"), std::string::npos);
  config.num_return_sequences = 1;
  EXPECT_EQ(ReadGroup(Start({1, 2, 3}, config))[0].ids, Ids(6, 0));
  ExpectNothingLeft();
}

TEST_F(GroupTest, SharesTheBeginningOfAnotherRequest) {
  InstallAndStart(SmallConfig());
  const Ids prompt = RandomPrompt(rng_, 80, vocab_size_);
  const std::vector<Sequence> expected = ReadGroup(Start(prompt, Beams(4, 30)));
  // Run together over the cached blocks of the earlier request: same output with the prefix cache
  // as without.
  std::vector<StartedRequest> others;
  for (int i = 0; i < 4; ++i) others.push_back(Start(prompt, Beams(4, 30)));
  for (const StartedRequest& other : others) EXPECT_EQ(ReadGroup(other), expected);
  EXPECT_GT(engine_->GetEngineStat("m")->prefix_cache_hit_token, 0);
}

TEST_F(GroupTest, AGuidedGroupIsRefused) {
  InstallAndStart(SmallConfig());
  for (const GenerationConfig& config : {Beams(2, 5), BestOf(2, 5)}) {
    const auto refused = engine_->StartRequest("m", Ids{1}, config, ThirdsMask());
    ASSERT_FALSE(refused.ok());
    EXPECT_NE(refused.status().message().find("is 2; it must be 1"), std::string::npos);
  }
}

}  // namespace
}  // namespace allspark::testing
