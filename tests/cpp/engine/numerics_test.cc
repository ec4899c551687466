// The numerics contract through the whole engine: the logits and tokens of a request have the same
// bits alone and in any batch, for any chunking, block size and number of threads, with forced
// preemption, in every cache mode, on every table.

#include "cpp/engine/numerics_harness.h"

namespace allspark::testing {
namespace {

class NumericsTest : public ::testing::TestWithParam<std::tuple<proto::ComputeType, CacheMode>> {
 protected:
  static proto::ComputeType compute() { return std::get<0>(GetParam()); }
  static RuntimeConfig Config() {
    RuntimeConfig config = SmallConfig();
    config.cache_mode = std::get<1>(GetParam());
    return config;
  }
};

TEST_P(NumericsTest, BitsAreTheSameInSmallCrowds) {
  ExpectInvariant(TinyLlamaSpec(compute()), 9, Config());
}

// Drafts change only the speed: greedy and sampled, with penalties and stop conditions, alone,
// together and under preemption.
TEST_P(NumericsTest, BitsAreTheSameWithDrafts) {
  const proto::DecoderSpec spec = TinyQwen2Spec(compute());
  std::mt19937 rng(12);
  const auto image = MakeRandomModel(spec, 5);
  std::vector<Job> jobs, drafting;
  for (int i = 0; i < 10; ++i) {
    Job job = MakeJob(rng, spec.vocab_size(), i % 2 == 1);
    // The prompt has few different tokens, and few tokens are likely: so the output repeats earlier
    // text.
    for (int64_t& id : job.prompt) id %= 5;
    job.config.max_new_tokens = 40 + i;
    job.config.top_k = 2;
    job.config.temperature = 0.2;
    if (i % 3 == 0) job.config.frequency_penalty = 0.01;
    if (i % 4 == 0) job.config.stop_words_ids = {{1, 2, 3, 4}};
    jobs.push_back(job);
    job.config.prompt_lookup_num_tokens = 1 + i % 9;
    drafting.push_back(job);
  }
  RuntimeConfig config = Config();
  Runner runner;
  const std::vector<Trace> expected = runner.Run(config, image, jobs);
  ASSERT_EQ(runner.drafts(), 0);
  RuntimeConfig tight = config;
  tight.num_blocks = 16;
  for (const RuntimeConfig& drafts : {config, tight}) {
    const std::vector<Trace> traces = runner.Run(drafts, image, drafting);
    EXPECT_GT(runner.accepted_drafts(), 50);
    EXPECT_GT(runner.drafts(), runner.accepted_drafts());
    for (size_t i = 0; i < jobs.size(); ++i) {
      EXPECT_EQ(traces[i].tokens, expected[i].tokens) << "job " << i;
      EXPECT_EQ(traces[i].digests, expected[i].digests) << "job " << i;
    }
  }
  config.max_draft_rows = 0;
  runner.Run(config, image, drafting);
  EXPECT_EQ(runner.drafts(), 0);
}

// The same with a draft model that mostly agrees: it has the model's first layers in the other
// compute type, and the model's other layers add nothing.
TEST_P(NumericsTest, BitsAreTheSameWithADraftModel) {
  proto::DecoderSpec spec = TinyQwen2Spec(compute());
  const auto draft_image =
      MakeRandomModel(TinyQwen2Spec(compute() == proto::COMPUTE_FLOAT32 ? proto::COMPUTE_BFLOAT16
                                                                        : proto::COMPUTE_FLOAT32),
                      5);
  spec.set_num_layers(24);
  const auto image = MakeRandomModel(spec, 5, /*silent_from=*/2);
  std::mt19937 rng(13);
  std::vector<Job> jobs;
  for (int i = 0; i < 10; ++i) {
    jobs.push_back(MakeJob(rng, spec.vocab_size(), i % 2 == 1));
    if (i % 3 == 0) jobs.back().config.repetition_penalty = 1.1;
    if (i % 4 == 0) jobs.back().config.prompt_lookup_num_tokens = 4;
  }
  RuntimeConfig config = Config();
  Runner runner;
  std::vector<Job> plain = jobs;
  for (Job& job : plain) job.config.prompt_lookup_num_tokens = 0;
  const std::vector<Trace> expected = runner.Run(config, image, plain);
  config.draft_model = "draft";
  for (int64_t chunk : {7, 64}) {
    for (int64_t blocks : {0, 16}) {
      config.engine_max_prefill_length = chunk;
      config.num_threads = chunk == 7 ? 1 : 2;
      config.num_blocks = blocks;
      const std::vector<Trace> traces = runner.Run(config, image, jobs, draft_image);
      // Small chunks leave few steps without a prefill.
      EXPECT_GT(runner.accepted_drafts(), chunk == 7 ? 0 : 30);
      for (size_t i = 0; i < jobs.size(); ++i) {
        EXPECT_EQ(traces[i].tokens, expected[i].tokens) << "job " << i;
        EXPECT_EQ(traces[i].digests, expected[i].digests) << "job " << i;
      }
    }
  }
}

// The logits that Python's tests compare with. An odd number of tokens: threads meet within a pair.
TEST_P(NumericsTest, LogitsAreTheSameInChunksAndOnThreads) {
  const auto image = MakeRandomModel(TinyLlamaSpec(compute()), 9);
  std::vector<int32_t> ids(301);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * i % 131);
  const auto logits = [&](const std::vector<int64_t>& chunks, int64_t threads) {
    ForwardOptions options;
    options.chunk_sizes = chunks;
    options.num_threads = threads;
    options.cache_mode = Config().cache_mode;
    return *ForwardLogits(image, "", "", ids, options);
  };
  const std::vector<float> alone = logits({}, 1);
  EXPECT_EQ(logits({}, 2), alone);
  EXPECT_EQ(logits({1, 7, 130}, 2), alone);
}

// Long tests. tests/cpp/model/decoder_bits_test.cc runs every table with every cache mode.
class LargeNumericsTest : public NumericsTest {};

TEST_P(LargeNumericsTest, BitsAreTheSameInCrowdsOf64) {
  ExpectInvariant(TinyQwen3Spec(compute()), 64, Config());
}

TEST_P(LargeNumericsTest, BitsAreTheSameOnEveryTable) {
  for (const kernels::KernelTable* table : kernels::AvailableTables()) {
    if (table == kernels::FindTable("reference")) continue;  // slow, and without tiles or chunks
    SCOPED_TRACE(table->name);
    ExpectInvariant(TinyQwen2Spec(compute()), 12, Config(), table);
    ExpectInvariant(TinyMistralSpec(compute()), 12, Config(), table);
    ExpectInvariant(TinyQuantizedSpec(compute()), 12, Config(), table);
    ExpectInvariant(TinyScaledSpec(compute()), 12, Config(), table);
  }
}

// On instruction sets that the processor lacks; numerics_slow_test.cc has more of these tests.
class EmulatedNumericsTest : public ::testing::TestWithParam<const kernels::KernelTable*> {};

TEST_P(EmulatedNumericsTest, BitsAreTheSameInSmallCrowds) {
  RuntimeConfig config = SmallConfig();
  config.cache_mode = CacheMode::kQuantI8;
  ExpectInvariant(TinyQuantizedSpec(proto::COMPUTE_BFLOAT16), 9, config, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Tables, EmulatedNumericsTest, ::testing::ValuesIn(EmulatedTables()),
                         TableName);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EmulatedNumericsTest);  // where there are none

INSTANTIATE_TEST_SUITE_P(Modes, NumericsTest,
                         ::testing::Combine(::testing::Values(proto::COMPUTE_FLOAT32,
                                                              proto::COMPUTE_BFLOAT16),
                                            ::testing::ValuesIn(kCacheModes)),
                         ModeName);
INSTANTIATE_TEST_SUITE_P(Modes, LargeNumericsTest,
                         ::testing::Combine(::testing::Values(proto::COMPUTE_FLOAT32,
                                                              proto::COMPUTE_BFLOAT16),
                                            ::testing::Values(CacheMode::kDefault)),
                         ModeName);

}  // namespace
}  // namespace allspark::testing
