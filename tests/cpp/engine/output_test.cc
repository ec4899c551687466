// Outputs besides tokens: tensors from the model, scores of the prompt, embeddings. Their shapes
// and order, the relations between them, their bits under any load, and their ownership.

#include <algorithm>
#include <cmath>

#include "cpp/engine/engine_harness.h"
#include "cpp/engine/function_mask.h"

namespace allspark::testing {
namespace {

// Everything that a queue gave; each tensor's rows are joined.
struct QueueOutputs {
  Ids tokens;
  std::map<std::string, std::vector<float>> tensors;
  std::map<std::string, int64_t> cols;
  std::vector<float> prompt_logprobs;
  std::vector<std::vector<std::pair<int64_t, float>>> prompt_top;

  bool operator==(const QueueOutputs&) const = default;
  int64_t rows(const std::string& name) const {
    return static_cast<int64_t>(tensors.at(name).size()) / cols.at(name);
  }
  std::vector<float> Row(const std::string& name, int64_t row) const {
    const auto begin = tensors.at(name).begin() + row * cols.at(name);
    return {begin, begin + cols.at(name)};
  }
  // The last `count` rows.
  std::vector<float> Tail(const std::string& name, int64_t count) const {
    return {tensors.at(name).end() - count * cols.at(name), tensors.at(name).end()};
  }
};

void Take(const GeneratedElements& elements, QueueOutputs& outcome) {
  const Ids& ids = elements.ids_from_generate;
  outcome.tokens.insert(outcome.tokens.end(), ids.begin(), ids.end());
  for (const auto& map : elements.tensors_from_model_inference) {
    for (const auto& [name, tensor] : map) {
      int64_t size = 1;
      for (int64_t dim : tensor.shape) size *= dim;
      ASSERT_GT(size, 0) << name;
      outcome.cols[name] = tensor.shape.back();
      auto& all = outcome.tensors[name];
      all.insert(all.end(), tensor.data.get(), tensor.data.get() + size);
    }
  }
  const auto& logprobs = elements.prompt_token_logprobs_list;
  outcome.prompt_logprobs.insert(outcome.prompt_logprobs.end(), logprobs.begin(), logprobs.end());
  const auto& top = elements.prompt_log_probs_list;
  outcome.prompt_top.insert(outcome.prompt_top.end(), top.begin(), top.end());
}

QueueOutputs ReadOutcome(ResultQueue& queue) {
  QueueOutputs outcome;
  while (auto elements = queue.Get()) Take(*elements, outcome);
  return outcome;
}

GenerationConfig Everything(GenerationConfig config) {
  config.output_logits = OutputRows::kAll;
  config.enable_tensors_from_model_inference = true;
  config.pooling = Pooling::kMean;
  config.prompt_logprobs = true;
  config.top_logprobs = 3;
  return config;
}

GenerationConfig PromptOnly() {
  GenerationConfig config;
  config.prompt_only = true;
  return config;
}

TEST_F(EngineTest, TensorsHaveARowForEveryTokenButTheLast) {
  InstallAndStart(SmallConfig());
  const Ids prompt = RandomPrompt(rng_, 70, vocab_size_);  // of three chunks
  const StartedRequest request = Start(prompt, Everything(Greedy(10)));
  QueueOutputs outcome;
  while (auto elements = request.queue->Get()) {
    Take(*elements, outcome);
    for (const char* name : {"logits", "hidden_states", "inputs_embedding"}) {
      ASSERT_EQ(outcome.rows(name), 70 + static_cast<int64_t>(outcome.tokens.size()) - 1) << name;
    }
  }
  ASSERT_EQ(outcome.tokens.size(), 10u);
  EXPECT_EQ(outcome.cols["logits"], vocab_size_);
  EXPECT_EQ(outcome.rows("embedding"), 1) << "once, with the first elements";
  EXPECT_EQ(outcome.cols["embedding"], outcome.cols["hidden_states"]);
  for (int64_t i = 0; i < 10; ++i) {
    const std::vector<float> row = outcome.Row("logits", 69 + i);
    EXPECT_EQ(std::max_element(row.begin(), row.end()) - row.begin(),
              outcome.tokens[static_cast<size_t>(i)]);
  }

  // A prompt of all these tokens gives the same rows, and no token.
  Ids all = prompt;
  all.insert(all.end(), outcome.tokens.begin(), outcome.tokens.end() - 1);
  const StartedRequest again = Start(all, Everything(PromptOnly()));
  const QueueOutputs same = ReadOutcome(*again.queue);
  EXPECT_TRUE(same.tokens.empty());
  for (const char* name : {"logits", "hidden_states", "inputs_embedding"}) {
    EXPECT_EQ(same.tensors.at(name), outcome.tensors.at(name)) << name;
  }
  // The scores follow from the logits, and the logits from the hidden states of the same model.
  ASSERT_EQ(same.prompt_logprobs.size(), all.size() - 1);
  for (size_t i = 0; i + 1 < all.size(); ++i) {
    const std::vector<float> row = same.Row("logits", static_cast<int64_t>(i));
    double sum = 0;
    for (float x : row) sum += std::exp(double{x});
    EXPECT_NEAR(same.prompt_logprobs[i],
                double{row[static_cast<size_t>(all[i + 1])]} - std::log(sum), 1e-5);
  }

  GenerationConfig generation = Greedy(10);
  generation.output_logits = generation.output_last_hidden_state = OutputRows::kGeneration;
  generation.logit_bias = {
      {outcome.tokens[0], 0.25}};  // The bias is not in the rows: they are as the model gave them.
  const QueueOutputs tail = ReadOutcome(*Start(prompt, generation).queue);
  EXPECT_EQ(tail.tokens, outcome.tokens);
  EXPECT_EQ(tail.tensors.size(), 2u);
  EXPECT_EQ(tail.tensors.at("logits"), outcome.Tail("logits", 10));
  EXPECT_EQ(tail.tensors.at("hidden_states"), outcome.Tail("hidden_states", 10));

  // A request that asks for no outputs gets none.
  const StartedRequest plain = Start(prompt, Greedy(2));
  EXPECT_TRUE(plain.queue->Get()->tensors_from_model_inference.empty());
}

TEST_F(EngineTest, EmbeddingsArePooledHiddenStates) {
  InstallAndStart(SmallConfig());
  const Ids prompt = RandomPrompt(rng_, 45, vocab_size_);
  GenerationConfig states = PromptOnly();
  states.output_last_hidden_state = OutputRows::kAll;
  const QueueOutputs hidden = ReadOutcome(*Start(prompt, states).queue);
  ASSERT_EQ(hidden.rows("hidden_states"), 45);
  for (const Pooling pooling : {Pooling::kMean, Pooling::kLast}) {
    for (const bool normalize : {false, true}) {
      GenerationConfig config = PromptOnly();
      config.pooling = pooling;
      config.normalize = normalize;
      const QueueOutputs pooled = ReadOutcome(*Start(prompt, config).queue);
      ASSERT_EQ(pooled.rows("embedding"), 1);
      std::vector<float> expected = hidden.Row("hidden_states", 44);
      double squares = 0;
      for (size_t i = 0; i < expected.size(); ++i) {
        double sum = 0;
        for (int64_t row = 0; row < 45; ++row) {
          sum += double{hidden.Row("hidden_states", row)[i]};
        }
        if (pooling == Pooling::kMean) expected[i] = static_cast<float>(sum / 45);
        squares += double{expected[i]} * double{expected[i]};
      }
      for (float& x : expected) {
        if (normalize) x = static_cast<float>(double{x} / std::sqrt(squares));
      }
      EXPECT_EQ(pooled.tensors.at("embedding"), expected) << ChoiceName(pooling) << normalize;
    }
  }
}

// The numerics contract for all outputs but tokens: alone, together, for any chunking and number of
// threads, with preemption, drafts and shared prefixes, and read at any moment.
TEST_F(EngineTest, OutputsAreTheSameBitsUnderAnyLoad) {
  std::vector<Ids> prompts;
  std::vector<GenerationConfig> configs;
  const proto::DecoderSpec spec = TinyQwen2Spec(proto::COMPUTE_BFLOAT16);
  for (int i = 0; i < 24; ++i) {
    GenerationConfig config = i % 3 == 0 ? PromptOnly() : Greedy(10 + 2 * i);
    if (i % 2 == 0) config = Everything(config);
    if (i % 4 == 1) config.output_last_hidden_state = OutputRows::kGeneration;
    if (i % 4 == 3) config.output_logits = OutputRows::kGeneration;
    if (i % 4 == 3) config.pooling = Pooling::kLast;
    config.prompt_lookup_num_tokens = i % 3;
    prompts.push_back(RandomPrompt(rng_, 1 + (i * 29) % 120, i % 2 == 0 ? spec.vocab_size() : 3));
    // Shared prefixes change nothing, not even if every token's outputs are requested.
    if (i % 5 == 4) {
      const Ids& before = prompts[prompts.size() - 2];
      std::copy_n(before.begin(), std::min(before.size(), prompts.back().size()),
                  prompts.back().begin());
    }
    configs.push_back(config);
  }
  const auto run = [&](RuntimeConfig config, bool together) {
    engine_ = std::make_unique<Engine>();
    Install(config, spec);
    hook_.loop_gate.Close();
    EXPECT_OK(engine_->StartModel("m"));
    if (!together) hook_.loop_gate.Open();
    std::vector<QueueOutputs> outcomes;
    std::vector<StartedRequest> requests;
    for (size_t i = 0; i < prompts.size(); ++i) {
      requests.push_back(Start(prompts[i], configs[i]));
      if (!together) outcomes.push_back(ReadOutcome(*requests[i].queue));
    }
    hook_.loop_gate.Open();
    for (size_t i = outcomes.size(); i < prompts.size(); ++i) {
      outcomes.push_back(ReadOutcome(*requests[i].queue));
    }
    return outcomes;
  };
  RuntimeConfig alone = SmallConfig();
  alone.engine_max_batch = 1;
  alone.num_threads = 1;
  const std::vector<QueueOutputs> expected = run(alone, false);
  RuntimeConfig tight = SmallConfig();
  tight.num_blocks = 16;
  RuntimeConfig small_chunks = SmallConfig(), large_chunks = SmallConfig();
  small_chunks.engine_max_prefill_length = 7;
  large_chunks.engine_max_prefill_length = 256;
  large_chunks.engine_max_batch = 24;
  for (const RuntimeConfig& config : {tight, small_chunks, large_chunks}) {
    const std::vector<QueueOutputs> outcomes = run(config, true);
    const EngineStat stat = *engine_->GetEngineStat("m");
    EXPECT_EQ(stat.num_preemptions > 0, config.num_blocks > 0);
    if (config.engine_max_prefill_length != 7) {
      EXPECT_GT(stat.total_accepted_draft_token, 0);
    }
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_EQ(outcomes[i], expected[i]) << i << ", chunk " << config.engine_max_prefill_length;
    }
  }
}

TEST_F(EngineTest, TensorsOutliveQueueRequestAndEngine) {
  InstallAndStart(SmallConfig());
  GenerationConfig config = PromptOnly();
  config.output_logits = OutputRows::kAll;
  StartedRequest request = Start({1, 2, 3, 4}, config);
  const GeneratedElements first = *request.queue->Get();
  GeneratedElements elements = first;
  EXPECT_OK(engine_->ReleaseRequest("m", request.handle));
  engine_.reset();
  request.queue.reset();
  const OutputTensor& tensor = elements.tensors_from_model_inference[0].at("logits");
  ASSERT_EQ(tensor.shape, (std::vector<int64_t>{4, vocab_size_}));
  tensor.data.get()[4 * vocab_size_ - 1] = 1;  // The reader owns the data now.
}

TEST_F(EngineTest, APromptAloneEndsWithItsLength) {
  InstallAndStart(SmallConfig());
  const StartedRequest request = Start(RandomPrompt(rng_, 256, vocab_size_), PromptOnly());
  const auto elements = request.queue->Get();
  ASSERT_TRUE(elements.has_value()) << "one set of elements, also of nothing";
  EXPECT_TRUE(elements->ids_from_generate.empty());
  EXPECT_FALSE(request.queue->Get().has_value());
  EXPECT_EQ(request.queue->GenerateStatus(), GenerateRequestStatus::kGenerateFinished);
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kLength);
  EXPECT_EQ(request.queue->GeneratedLength(), 0u);
  EXPECT_EQ(engine_->GetEngineStat("m")->total_generated_token, 0);
  EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);

  // Options about generated tokens have no effect.
  GenerationConfig config = PromptOnly();
  config.max_new_tokens = config.min_new_tokens = 5;
  config.prompt_lookup_num_tokens = 4;
  config.prompt_logprobs = true;
  const QueueOutputs outcome = ReadOutcome(*Start({1, 2, 3}, config).queue);
  EXPECT_TRUE(outcome.tokens.empty());
  EXPECT_EQ(outcome.prompt_logprobs.size(), 2u);

  const Status longer = engine_->StartRequest("m", Ids(257, 1), PromptOnly()).status();
  EXPECT_EQ(longer.as_status(), AsStatus::kExceedLimitError);
  EXPECT_NE(longer.message().find("not exceed max_length, which is 256"), std::string::npos);
  const Status masked = engine_->StartRequest("m", Ids{1, 2}, PromptOnly(), ThirdsMask()).status();
  EXPECT_EQ(masked.as_status(), AsStatus::kParamError);
  EXPECT_NE(masked.message().find("prompt_only"), std::string::npos);
}

TEST_F(EngineTest, AStoppedPromptGivesNothing) {
  InstallAndStart(SmallConfig());
  GateSteps();
  const HookGuard guard(hook_);
  gate_.Close();
  const StartedRequest request =
      Start(RandomPrompt(rng_, 200, vocab_size_), Everything(PromptOnly()));
  gate_.WaitArrived();
  EXPECT_OK(engine_->StopRequest("m", request.handle));
  gate_.Open();
  EXPECT_FALSE(request.queue->Get().has_value());
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kCancelled);
}

TEST_F(EngineTest, RefusesTensorsThatItCannotGive) {
  InstallAndStart(SmallConfig());
  struct Case {
    std::function<void(GenerationConfig&)> change;
    std::string words;
  };
  const std::vector<Case> cases = {
      {[](auto& c) { c.output_logits = static_cast<OutputRows>(3); },
       "output_logits is 3; it must be \"\", \"all\" or \"generation\""},
      {[](auto& c) { c.output_last_hidden_state = static_cast<OutputRows>(-1); },
       "output_last_hidden_state is -1"},
      {[](auto& c) { c.pooling = static_cast<Pooling>(7); },
       "pooling is 7; it must be \"\", \"mean\" or \"last\""},
  };
  for (const Case& c : cases) {
    GenerationConfig config = Greedy(1);
    c.change(config);
    const Status status = engine_->StartRequest("m", Ids{1, 2}, config).status();
    EXPECT_EQ(status.as_status(), AsStatus::kParamError);
    EXPECT_NE(status.message().find(c.words), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace allspark::testing
