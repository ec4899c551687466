// Requests that were stopped, interrupted or ended, and are started again with their generated
// tokens. They give the rest of the same output, bit for bit, and only compute their last block
// again.

#include <optional>

#include "cpp/engine/engine_harness.h"
#include "cpp/engine/function_mask.h"

namespace allspark::testing {
namespace {

// A request's outputs for each of its tokens, and how it ended.
struct Outcome {
  Ids tokens;
  std::vector<float> logprobs;
  std::vector<std::vector<std::pair<int64_t, float>>> top;
  std::vector<uint64_t> digests;  // of the model's logits
  FinishReason reason = FinishReason::kNone;
  bool operator==(const Outcome&) const = default;

  // The outcome without its first `count` tokens.
  Outcome Rest(size_t count) const {
    const auto from = static_cast<std::ptrdiff_t>(count);
    Outcome rest = *this;
    rest.tokens.erase(rest.tokens.begin(), rest.tokens.begin() + from);
    rest.digests.erase(rest.digests.begin(), rest.digests.begin() + from);
    if (logprobs.empty()) return rest;
    rest.logprobs.erase(rest.logprobs.begin(), rest.logprobs.begin() + from);
    rest.top.erase(rest.top.begin(), rest.top.begin() + from);
    return rest;
  }
};

// Begins in the state after `last_token`; allows another third after each token.
std::shared_ptr<FunctionMask> ThirdsMaskAfter(int64_t last_token) {
  return std::make_shared<FunctionMask>([last_token](FunctionMask& mask, int32_t token) {
    mask.PublishEvery(3, (token >= 0 ? token : last_token) + 1);
  });
}

class ResumeTest : public EngineTest {
 protected:
  void SetUp() override {
    hook_.Set([this](const StepEvent& event) { Record(event); });
  }
  void TearDown() override { hook_.Set({}); }

  void Record(const StepEvent& event) {
    if (event.phase != StepPhase::kLogits) return;
    digests_[event.request_id].push_back(testing::LogitsDigest(event));
  }
  Ids Prompt(int64_t length) { return RandomPrompt(rng_, length, vocab_size_); }
  Outcome Read(const StartedRequest& request) {
    Outcome outcome;
    while (auto elements = request.queue->Get()) {
      const auto append = [](auto& to, const auto& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      append(outcome.tokens, elements->ids_from_generate);
      append(outcome.logprobs, elements->token_logprobs_list);
      append(outcome.top, elements->log_probs_list);
      num_cached_ = elements->prefix_cache_len;
    }
    outcome.reason = request.queue->finish_reason();
    outcome.digests = digests_[request.handle.id];
    return outcome;
  }
  // Starts a request again with the first `count` tokens of its output.
  StartedRequest Resume(const Ids& prompt, const Ids& output, size_t count, GenerationConfig config,
                        std::shared_ptr<TokenMask> mask = nullptr) {
    Ids ids = prompt;
    ids.insert(ids.end(), output.begin(), output.begin() + static_cast<std::ptrdiff_t>(count));
    config.num_generated_in_prompt = static_cast<int64_t>(count);
    Result<StartedRequest> started = engine_->StartRequest("m", ids, config, std::move(mask));
    EXPECT_TRUE(started.ok()) << started.status().ToString();
    return *started;
  }

  std::map<uint64_t, std::vector<uint64_t>> digests_;
  int64_t num_cached_ = 0;  // of the last request that was read
};

// Configs with every option that depends on the output, or on where it began.
std::vector<GenerationConfig> Configs(const Ids& words) {
  std::vector<GenerationConfig> configs{Greedy(60), Drawn(60, 3)};
  GenerationConfig config = Drawn(60, 4);
  config.repetition_penalty = 1.4;
  config.suppress_repetition_in_generation = true;
  config.frequency_penalty = 0.7;
  config.presence_penalty = -0.3;
  config.no_repeat_ngram_size = 2;
  config.logprobs = true;
  config.top_logprobs = 4;
  configs.push_back(config);
  config = Drawn(60, 5);
  config.logprobs = true;
  config.logprobs_mode = LogprobsMode::kRaw;
  config.min_new_tokens = 40;
  config.stop_token_ids = words;
  config.bad_words_ids = {{words[0], words[1]}, {words[2]}};
  config.logit_bias = {{words[3], 4.0}};
  configs.push_back(config);
  // Short cycles: requests end at a loop that begins before the cut.
  config = Greedy(60);
  config.logit_bias = {{words[0], 40}, {words[1], 40}};
  config.repetition_ngram_size = 2;
  config.repetition_ngram_threshold = 20;
  configs.push_back(config);
  config.repetition_ngram_size = 0;
  config.stop_words_ids = {Ids(8, words[0]), Ids(8, words[1])};
  config.min_new_tokens = 20;
  configs.push_back(config);
  config = Drawn(60, 6);
  config.prompt_lookup_num_tokens = 6;
  configs.push_back(config);
  config = Drawn(0, 7);
  config.max_length = 150;
  config.min_length = 100;
  config.eos_token_id = words[4];
  configs.push_back(config);
  return configs;
}

TEST_F(ResumeTest, GivesTheRestBitForBit) {
  InstallAndStart(SmallConfig());
  const std::vector<GenerationConfig> configs = Configs(Prompt(6));
  for (size_t i = 0; i < configs.size(); ++i) {
    const Ids prompt = Prompt(37);
    const Outcome whole = Read(Start(prompt, configs[i]));
    ASSERT_GT(whole.tokens.size(), 8u) << i;
    for (const size_t count : {size_t{1}, whole.tokens.size() / 2, whole.tokens.size() - 1}) {
      EXPECT_EQ(Read(Resume(prompt, whole.tokens, count, configs[i])), whole.Rest(count))
          << "config " << i << " after " << count;
      // All blocks but the last, which is never full.
      const auto known = static_cast<int64_t>(prompt.size() + count);
      EXPECT_EQ(num_cached_, (known - 1) / 16 * 16);
    }
  }
}

TEST_F(ResumeTest, WithoutTheFieldTheOutputBeginsAnew) {
  InstallAndStart(SmallConfig());
  const Ids prompt = Prompt(20);
  GenerationConfig config = Greedy(30);
  config.frequency_penalty = 2;
  config.presence_penalty = 2;
  const Outcome whole = Read(Start(prompt, config));
  Ids ids = prompt;
  ids.insert(ids.end(), whole.tokens.begin(), whole.tokens.begin() + 15);
  EXPECT_EQ(Read(Start(ids, config)).tokens.size(), 30u);
  EXPECT_NE(Read(Start(ids, config)).digests, whole.Rest(15).digests);
}

TEST_F(ResumeTest, AStoppedRequestCostsItsLastBlock) {
  Install(SmallConfig());
  const Ids prompt = Prompt(50);
  std::optional<StartedRequest> stopped;
  int64_t steps = 0;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    Record(event);
    if (event.phase == StepPhase::kBegin && ++steps == 30) {
      EXPECT_OK(engine_->StopRequest("m", stopped->handle));
    }
  });
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  stopped = Start(prompt, Drawn(100, 9));
  hook_.loop_gate.Open();
  const Ids output = ReadAll(*stopped->queue);
  EXPECT_EQ(stopped->queue->finish_reason(), FinishReason::kCancelled);
  ASSERT_GT(output.size(), 20u);
  ASSERT_LT(output.size(), 100u);
  EXPECT_EQ(*engine_->FindPrefix("m", prompt), 48);  // answered between steps

  const auto known = static_cast<int64_t>(prompt.size() + output.size());
  const int64_t before = engine_->GetEngineStat("m")->total_prefill_token;
  const Outcome rest = Read(Resume(prompt, output, output.size(), Drawn(100, 9)));
  EXPECT_EQ(rest.tokens.size(), 100 - output.size());
  EXPECT_EQ(num_cached_, (known - 1) / 16 * 16);
  const Outcome whole = Read(Start(prompt, Drawn(100, 9)));
  EXPECT_EQ(*engine_->FindPrefix("m", prompt), 48);
  const int64_t prefilled = engine_->GetEngineStat("m")->total_prefill_token - before;
  EXPECT_EQ(prefilled, known - num_cached_ - (known - 1) / 16 * 16 + 50);
  EXPECT_EQ(rest, whole.Rest(output.size()));
}

TEST_F(ResumeTest, InterruptedRequestsComeToTheirEnds) {
  RuntimeConfig config = SmallConfig();
  config.num_blocks = 20;
  config.interrupt_on_cache_exhaustion = true;
  InstallAndStart(config);
  struct Job {
    Ids prompt, output;
    GenerationConfig config;
    StartedRequest request;
  };
  std::vector<Job> jobs;
  for (int i = 0; i < 8; ++i) {
    jobs.push_back({Prompt(40), {}, i % 2 == 0 ? Greedy(120) : Drawn(120, i), {}});
    jobs.back().config.frequency_penalty = 0.5;
  }
  for (Job& job : jobs) job.request = Start(job.prompt, job.config);
  int64_t num_resumed = 0;
  for (Job& job : jobs) {
    while (true) {
      const Ids more = ReadAll(*job.request.queue);
      job.output.insert(job.output.end(), more.begin(), more.end());
      if (job.request.queue->finish_reason() != FinishReason::kInterrupted) break;
      ++num_resumed;
      job.request = Resume(job.prompt, job.output, job.output.size(), job.config);
    }
  }
  EXPECT_GT(num_resumed, 2);
  for (const Job& job : jobs) EXPECT_EQ(job.output, Run(job.prompt, job.config));
}

TEST_F(ResumeTest, AGuidedRequestGoesOnWithAMaskThatKnowsTheOutput) {
  InstallAndStart(SmallConfig());
  const Ids prompt = Prompt(20);
  const StartedRequest guided =
      *engine_->StartRequest("m", prompt, Drawn(60, 11), ThirdsMaskAfter(-1));
  const Outcome whole = Read(guided);
  ASSERT_EQ(whole.tokens.size(), 60u);
  for (const size_t count : {size_t{1}, size_t{31}}) {
    const auto mask = ThirdsMaskAfter(whole.tokens[count - 1]);
    EXPECT_EQ(Read(Resume(prompt, whole.tokens, count, Drawn(60, 11), mask)), whole.Rest(count));
  }
}

TEST_F(ResumeTest, ToTheRestWhatIsGivenIsThePrompt) {
  InstallAndStart(SmallConfig());
  const Ids prompt = Prompt(20);
  GenerationConfig config = Greedy(30);
  config.prompt_logprobs = true;
  config.output_logits = OutputRows::kGeneration;
  const Outcome whole = Read(Start(prompt, config));
  const StartedRequest resumed = Resume(prompt, whole.tokens, 12, config);
  size_t num_scores = 0, num_rows = 0;
  while (auto elements = resumed.queue->Get()) {
    num_scores += elements->prompt_token_logprobs_list.size();
    const auto& logits = elements->tensors_from_model_inference[0].at("logits");
    num_rows += static_cast<size_t>(logits.shape[0]);
  }
  EXPECT_EQ(num_scores, 20u + 12 - 1);
  EXPECT_EQ(num_rows, 18u);
  EXPECT_EQ(resumed.queue->RequestStatInfo().at("context_token_length"), 32);
  EXPECT_EQ(resumed.queue->RequestStatInfo().at("generated_token_length"), 18);
}

TEST_F(ResumeTest, RefusesWhatCannotBeResumed) {
  InstallAndStart(SmallConfig());
  const auto refusal = [&](const Ids& prompt, const GenerationConfig& config) {
    const Status status = engine_->StartRequest("m", prompt, config).status();
    EXPECT_EQ(status.as_status(), AsStatus::kParamError) << status.ToString();
    return status.message();
  };
  GenerationConfig config = Greedy(30);
  config.num_generated_in_prompt = 4;
  EXPECT_EQ(refusal({1, 2, 3, 4}, config),
            "num_generated_in_prompt is 4; it must be below the length of input_ids, which is 4");
  config.max_new_tokens = 4;
  EXPECT_EQ(refusal({1, 2, 3, 4, 5}, config),
            "num_generated_in_prompt is 4; it must be below max_new_tokens, which is 4");
  config = Greedy(250);
  config.num_generated_in_prompt = 4;
  config.min_new_tokens = 249;
  EXPECT_EQ(refusal(Ids(14, 1), config),
            "min_new_tokens is 249; it must not exceed the longest output this request can reach, "
            "which is 246");
}

}  // namespace
}  // namespace allspark::testing
