// A draft model changes only the speed. The model here has 24 layers; only the first two change the
// residual stream. So a draft model of these two layers predicts every token, and a draft model
// that missed part of a text shows as a rejected draft.

#include <algorithm>
#include <filesystem>

#include "cpp/engine/engine_harness.h"

namespace allspark::testing {
namespace {

class DraftModelTest : public EngineTest {
 protected:
  // Starts the model "m" with this draft model; the hook's closed gate holds its step thread.
  void Start(RuntimeConfig config, const proto::DecoderSpec& draft_spec, uint64_t draft_seed) {
    ASSERT_OK(engine_->RegisterImage("draft", MakeRandomModel(draft_spec, draft_seed)));
    config.draft_model = "draft";
    InstallDeep(config);
    hook_.loop_gate.Close();
    ASSERT_OK(engine_->StartModel("m"));
  }

  void InstallDeep(const RuntimeConfig& config) {
    ASSERT_OK(engine_->RegisterImage("m", image_));
    ASSERT_OK(engine_->InstallModel(config));
    ASSERT_OK(TestingAccess::SetStepHook(*engine_, "m", std::ref(hook_)));
  }

  // The outputs of the requests, which run together.
  std::vector<Ids> RunAll(const std::vector<Ids>& prompts,
                          const std::vector<GenerationConfig>& configs) {
    std::vector<StartedRequest> requests;
    for (size_t i = 0; i < prompts.size(); ++i) {
      requests.push_back(*engine_->StartRequest("m", prompts[i], configs[i]));
    }
    hook_.loop_gate.Open();
    std::vector<Ids> outputs;
    for (const StartedRequest& request : requests) outputs.push_back(ReadAll(*request.queue));
    return outputs;
  }

  // The outputs without a draft model.
  std::vector<Ids> Expected(const std::vector<Ids>& prompts,
                            const std::vector<GenerationConfig>& configs,
                            CacheMode cache_mode = CacheMode::kDefault) {
    Engine engine;
    std::vector<Ids> outputs;
    EXPECT_OK(engine.RegisterImage("m", image_));
    RuntimeConfig config = SmallConfig();
    config.cache_mode = cache_mode;
    EXPECT_OK(engine.InstallModel(config));
    EXPECT_OK(engine.StartModel("m"));
    for (size_t i = 0; i < prompts.size(); ++i) {
      outputs.push_back(ReadAll(*engine.StartRequest("m", prompts[i], configs[i])->queue));
    }
    return outputs;
  }

  // Prompts from one token to several chunks, greedy and sampled.
  void MakeRequests(int count, std::vector<Ids>& prompts, std::vector<GenerationConfig>& configs) {
    for (int i = 0; i < count; ++i) {
      prompts.push_back(i % 2 == 1 && i % 4 == 1
                            ? prompts.back()
                            : RandomPrompt(rng_, 1 + (i * 37) % 150, spec_.vocab_size()));
      GenerationConfig config = Greedy(60 + i);
      if (i % 3 == 1) {
        config.do_sample = true;
        config.seed = i;
        config.top_p = 0.9;
      }
      configs.push_back(config);
    }
  }

  static constexpr uint64_t kSeed = 5;
  static proto::DecoderSpec DeepSpec() {
    proto::DecoderSpec spec = TinyQwen2Spec();
    spec.set_num_layers(24);
    return spec;
  }
  const proto::DecoderSpec spec_ = TinyQwen2Spec();
  const std::shared_ptr<const ModelImage> image_ = MakeRandomModel(DeepSpec(), kSeed, 2);
};

TEST_F(DraftModelTest, OneThatSaysTheSameIsAlwaysRight) {
  std::vector<Ids> prompts;
  std::vector<GenerationConfig> configs;
  MakeRequests(12, prompts, configs);
  struct Case {
    int64_t chunk, blocks, threads;
    bool sharing;  // Some of the prompts are equal.
    CacheMode cache_mode;
  };
  // In the last three cases the pool holds little more than one longest request: others are
  // preempted.
  for (const Case& c :
       {Case{64, 0, 2, false, CacheMode::kDefault}, Case{7, 0, 1, true, CacheMode::kDefault},
        Case{64, 17, 2, true, CacheMode::kDefault}, Case{64, 17, 2, true, CacheMode::kQuantI8},
        Case{64, 17, 2, true, CacheMode::kQuantU4}}) {
    const std::vector<Ids> expected = Expected(prompts, configs, c.cache_mode);
    engine_ = std::make_unique<Engine>();
    RuntimeConfig config = SmallConfig();
    config.engine_max_prefill_length = c.chunk;
    config.num_blocks = c.blocks;
    config.num_threads = c.threads;
    config.num_draft_tokens = 3;
    config.enable_prefix_cache = c.sharing;
    config.cache_mode = c.cache_mode;
    Start(config, spec_, kSeed);
    EXPECT_EQ(RunAll(prompts, configs), expected) << "chunk " << c.chunk;
    ASSERT_OK(engine_->StopModel("m"));  // The step's counters come after its tokens.
    const EngineStat stat = *engine_->GetEngineStat("m");
    // Small chunks leave few steps without a prefill.
    EXPECT_GT(stat.total_draft_token, c.chunk == 7 ? 20 : 100) << "chunk " << c.chunk;
    EXPECT_EQ(stat.total_accepted_draft_token, stat.total_draft_token) << "chunk " << c.chunk;
    EXPECT_EQ(stat.num_preemptions > 0, c.blocks > 0);
  }
}

TEST_F(DraftModelTest, TakesFewerStepsThanTokens) {
  Start(SmallConfig(), spec_, kSeed);
  RunAll({{1, 2, 3}}, {Greedy(100)});
  EXPECT_LT(engine_->GetEngineStat("m")->num_steps, 40);
}

TEST_F(DraftModelTest, AnotherModelIsAskedSeldomAndChangesNothing) {
  std::vector<Ids> prompts;
  std::vector<GenerationConfig> configs;
  MakeRequests(8, prompts, configs);
  for (GenerationConfig& config : configs) config.max_new_tokens = 100;
  const std::vector<Ids> expected = Expected(prompts, configs);
  proto::DecoderSpec other = TinyMistralSpec(proto::COMPUTE_BFLOAT16);
  other.set_vocab_size(spec_.vocab_size());
  Start(SmallConfig(), other, 77);
  EXPECT_EQ(RunAll(prompts, configs), expected);
  const EngineStat stat = *engine_->GetEngineStat("m");
  EXPECT_GT(stat.total_draft_token, 0);
  EXPECT_LT(stat.total_draft_token, 200) << "of 800 tokens";
}

TEST_F(DraftModelTest, DraftsBesidePromptLookupAndOnlyForRequestsThatWantIt) {
  Start(SmallConfig(), spec_, kSeed);
  std::vector<GenerationConfig> configs(3, Greedy(60));
  configs[1].use_draft_model = false;
  configs[2].prompt_lookup_num_tokens = 8;
  const std::vector<Ids> prompts(3, Ids{4, 5, 6, 4, 5, 6, 4, 5});
  std::vector<StartedRequest> requests;
  for (const GenerationConfig& config : configs) {
    requests.push_back(*engine_->StartRequest("m", prompts[0], config));
  }
  hook_.loop_gate.Open();
  for (const StartedRequest& request : requests) ReadAll(*request.queue);
  const auto drafted = [&](size_t i) {
    return requests[i].queue->RequestStatInfo().at("draft_token_length");
  };
  EXPECT_GT(drafted(0), 20);
  EXPECT_EQ(drafted(1), 0);
  EXPECT_GT(drafted(2), 20);
}

TEST_F(DraftModelTest, StopsAtAnyMomentAndStartsAgain) {
  Start(SmallConfig(), spec_, kSeed);
  hook_.loop_gate.Open();
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 30; ++i) {
      const StartedRequest request =
          EngineTest::Start(RandomPrompt(rng_, 1 + i * 7, spec_.vocab_size()), Greedy(40));
      if (i % 3 == 0) EXPECT_OK(engine_->StopRequest("m", request.handle));
      if (i % 3 == 1) EXPECT_OK(engine_->ReleaseRequest("m", request.handle));
    }
    ASSERT_OK(engine_->SyncAllRequests("m"));
    EXPECT_EQ(engine_->GetEngineStat("m")->used_blocks, 0);
    ASSERT_OK(engine_->StopModel("m"));
    ASSERT_OK(engine_->StartModel("m"));
  }
}

TEST_F(DraftModelTest, ItsCacheIsPartOfThePool) {
  InstallDeep(SmallConfig());
  ASSERT_OK(engine_->StartModel("m"));
  const int64_t alone = TestingAccess::DeviceStats(*engine_).bytes_in_use;
  ASSERT_OK(engine_->StopModel("m"));
  ASSERT_OK(engine_->ReleaseModel("m"));
  Start(SmallConfig(), spec_, kSeed);
  // 8 requests of 256 tokens; 2 layers of one KV head of 24, key and value, float32.
  EXPECT_GE(TestingAccess::DeviceStats(*engine_).bytes_in_use, alone + 8 * 256 * 2 * 24 * 2 * 4);
  hook_.loop_gate.Open();
}

TEST_F(DraftModelTest, RefusesModelsThatDoNotFit) {
  ASSERT_OK(engine_->RegisterImage("m", image_));
  proto::DecoderSpec other = spec_;
  other.set_vocab_size(spec_.vocab_size() + 3);
  ASSERT_OK(engine_->RegisterImage("other", MakeRandomModel(other, 1)));
  const auto refused = [&](const std::string& draft_model, StatusCode code,
                           std::vector<std::string> words) {
    RuntimeConfig config = SmallConfig();
    config.draft_model = draft_model;
    const Status status = engine_->InstallModel(config);
    EXPECT_EQ(status.code(), code) << status.ToString();
    words.push_back(draft_model);
    for (const std::string& word : words) {
      EXPECT_NE(status.message().find(word), std::string::npos) << word << ": " << status.message();
    }
  };
  refused("other", StatusCode::kInvalidArgument,
          {"draft_model", std::to_string(spec_.vocab_size()), std::to_string(other.vocab_size())});
  refused("nobody", StatusCode::kNotFound, {"draft_model"});
  refused("/no/such.asgraph", StatusCode::kNotFound, {});
  RuntimeConfig config = SmallConfig();
  config.num_draft_tokens = 65;
  EXPECT_NE(engine_->InstallModel(config).message().find("num_draft_tokens is 65"),
            std::string::npos);
  // The refused draft model can still be installed as a model.
  EXPECT_OK(engine_->InstallModel(SmallConfig("other")));
}

TEST_F(DraftModelTest, OneWithoutARopeToScaleKeepsItsOwn) {
  proto::DecoderSpec other = TinyGpt2Spec();
  other.set_vocab_size(spec_.vocab_size());
  RuntimeConfig config = SmallConfig();
  config.rope_scaling_factor = 2.0;  // Which changes nothing up to the trained length.
  Start(config, other, 77);
  EXPECT_EQ(RunAll({{1, 2, 3}}, {Greedy(60)}), Expected({{1, 2, 3}}, {Greedy(60)}));
}

TEST_F(DraftModelTest, AStartThatFailsNamesIt) {
  static kernels::KernelTable table = *kernels::FindTable("reference");  // It outlives the engine.
  table.layer_norm[static_cast<int>(DType::kFloat32)] = nullptr;
  TestingAccess::SetKernelTable(*engine_, &table);
  proto::DecoderSpec other = TinyGpt2Spec();
  other.set_vocab_size(spec_.vocab_size());
  ASSERT_OK(engine_->RegisterImage("draft", MakeRandomModel(other, 1)));
  RuntimeConfig config = SmallConfig();
  config.draft_model = "draft";
  InstallDeep(config);
  const Status status = engine_->StartModel("m");
  EXPECT_EQ(status.code(), StatusCode::kUnimplemented);
  EXPECT_TRUE(status.message().starts_with("draft_model is 'draft', which cannot be used: kernel"))
      << status.message();
}

}  // namespace
}  // namespace allspark::testing
