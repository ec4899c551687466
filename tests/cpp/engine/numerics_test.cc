// The numerics contract through the whole engine: logits and tokens of a request are the same bits
// alone, in crowds, for any chunking and block size, with preemption forced, for any number of
// threads, with every way to keep the cache, on every table.

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstdlib>

#include "cpp/engine/engine_harness.h"
#include "kernels/kernel_table.h"

namespace allspark::testing {
namespace {

struct Trace {
  Ids tokens;
  std::vector<uint64_t> digests;  // of the logits of each token
  bool operator==(const Trace&) const = default;
};

struct Job {
  Ids prompt;
  GenerationConfig config;
};

// Runs the jobs together in a fresh engine and returns each one's tokens and logits digests.
class Runner {
 public:
  std::vector<Trace> Run(const RuntimeConfig& config,
                         const std::shared_ptr<const ModelImage>& image,
                         const std::vector<Job>& jobs,
                         const std::shared_ptr<const ModelImage>& draft_image = nullptr) {
    Engine engine;
    digests_.clear();
    Check(engine.RegisterImage(config.model_name, image));
    if (draft_image != nullptr) Check(engine.RegisterImage(config.draft_model, draft_image));
    Check(engine.InstallModel(config));
    hook_.Set([this](const StepEvent& event) { OnEvent(event); });
    Check(TestingAccess::SetStepHook(engine, config.model_name, &Hook::Call, &hook_));
    hook_.loop_gate.Close();
    Check(engine.StartModel(config.model_name));
    std::vector<StartedRequest> requests;
    for (const Job& job : jobs) {
      auto started = engine.StartRequest(config.model_name, job.prompt, job.config);
      Check(started.status());
      requests.push_back(*started);
    }
    hook_.loop_gate.Open();
    std::vector<Trace> traces(jobs.size());
    for (size_t i = 0; i < jobs.size(); ++i) traces[i].tokens = ReadAll(*requests[i].queue);
    const EngineStat stat = *engine.GetEngineStat(config.model_name);
    preemptions_ = stat.num_preemptions;
    accepted_drafts_ = stat.total_accepted_draft_token;
    drafts_ = stat.total_draft_token;
    Check(engine.StopModel(config.model_name));
    for (size_t i = 0; i < jobs.size(); ++i) traces[i].digests = digests_[requests[i].handle.id];
    return traces;
  }
  int64_t preemptions() const { return preemptions_; }
  int64_t drafts() const { return drafts_; }
  int64_t accepted_drafts() const { return accepted_drafts_; }

 private:
  static void Check(const Status& status) {
    if (!status.ok()) throw std::runtime_error(status.ToString());
  }
  void OnEvent(const StepEvent& event) {
    if (event.phase != StepPhase::kLogits) return;
    digests_[event.request_id].push_back(
        XXH3_64bits(event.logits, static_cast<size_t>(event.vocab_size) * sizeof(float)));
  }
  Hook hook_;
  std::map<uint64_t, std::vector<uint64_t>> digests_;
  int64_t preemptions_ = 0, drafts_ = 0, accepted_drafts_ = 0;
};

Job MakeJob(std::mt19937& rng, int64_t vocab_size, bool sampled) {
  Job job;
  job.prompt = RandomPrompt(rng, 1 + static_cast<int64_t>(rng() % 100), vocab_size);
  // Long enough for a crowd to outgrow the blocks that its prompts were admitted with.
  job.config = Greedy(4 + static_cast<int64_t>(rng() % 60));
  if (sampled) {
    job.config.do_sample = true;
    job.config.temperature = 0.9;
    job.config.top_p = 0.95;
    job.config.seed = static_cast<int64_t>(rng() % 1000);
  }
  return job;
}

class NumericsTest : public ::testing::TestWithParam<std::tuple<proto::ComputeType, CacheMode>> {
 protected:
  void TearDown() override { unsetenv("ALLSPARK_CPU_ISA"); }

  static proto::ComputeType compute() { return std::get<0>(GetParam()); }
  static RuntimeConfig Config() {
    RuntimeConfig config = SmallConfig();
    config.cache_mode = std::get<1>(GetParam());
    return config;
  }

  void ExpectInvariant(const proto::DecoderSpec& spec, int crowd) {
    std::mt19937 rng(11);
    const auto image = MakeRandomModel(spec, 5);
    RuntimeConfig config = Config();
    config.engine_max_batch = crowd;
    std::vector<Job> jobs;
    for (int i = 0; i < crowd; ++i) jobs.push_back(MakeJob(rng, spec.vocab_size(), i % 2 == 1));

    Runner runner;
    std::vector<Trace> alone;
    RuntimeConfig alone_config = config;
    alone_config.engine_max_batch = 1;
    alone_config.num_threads = 1;
    for (const Job& job : jobs) alone.push_back(runner.Run(alone_config, image, {job})[0]);

    for (int64_t chunk : {1, 7, 64, 256}) {
      for (int64_t threads : {1, 2}) {
        RuntimeConfig changed = config;
        changed.engine_max_prefill_length = chunk;
        changed.num_threads = threads;
        changed.cache_span_size = chunk == 7 ? 64 : 16;
        const std::vector<Trace> together = runner.Run(changed, image, jobs);
        for (size_t i = 0; i < jobs.size(); ++i) {
          EXPECT_EQ(together[i].tokens, alone[i].tokens)
              << "job " << i << " of " << crowd << ", chunk " << chunk << ", threads " << threads;
          EXPECT_EQ(together[i].digests, alone[i].digests)
              << "job " << i << " of " << crowd << ", chunk " << chunk << ", threads " << threads;
        }
      }
    }
    // A pool of one longest request: the rest is preempted over and over.
    RuntimeConfig tight = config;
    tight.cache_span_num_init = 16;
    const std::vector<Trace> squeezed = runner.Run(tight, image, jobs);
    EXPECT_GT(runner.preemptions(), 0) << crowd;
    for (size_t i = 0; i < jobs.size(); ++i) {
      EXPECT_EQ(squeezed[i].tokens, alone[i].tokens) << "job " << i << " under pressure";
      // A recomputed position may be computed again, never otherwise: the digests hold each in
      // order.
      EXPECT_EQ(squeezed[i].digests, alone[i].digests) << "job " << i << " under pressure";
    }
  }
};

TEST_P(NumericsTest, BitsAreTheSameInSmallCrowds) { ExpectInvariant(TinyLlamaSpec(compute()), 9); }

// Drafts change the speed and nothing else: greedy and sampled, with penalties and stops,
// alone, in a crowd and under preemption.
TEST_P(NumericsTest, BitsAreTheSameWithDrafts) {
  const proto::DecoderSpec spec = TinyQwen2Spec(compute());
  std::mt19937 rng(12);
  const auto image = MakeRandomModel(spec, 5);
  std::vector<Job> jobs, drafting;
  for (int i = 0; i < 10; ++i) {
    Job job = MakeJob(rng, spec.vocab_size(), i % 2 == 1);
    // A prompt of few tokens, and few that are likely: the output repeats what was there.
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
  tight.cache_span_num_init = 16;
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

// The same by a draft model, which here agrees mostly: it is what the model's first layers are, in
// the other compute type, and the other layers add nothing.
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
      config.cache_span_num_init = blocks;
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

// What takes long. Every table with every cache: tests/cpp/model/decoder_bits_test.cc.
class LargeNumericsTest : public NumericsTest {};

TEST_P(LargeNumericsTest, BitsAreTheSameInCrowdsOf64) {
  ExpectInvariant(TinyQwen3Spec(compute()), 64);
}

TEST_P(LargeNumericsTest, BitsAreTheSameOnEveryTable) {
  for (const kernels::KernelTable* table : kernels::AvailableTables()) {
    setenv("ALLSPARK_CPU_ISA", table->name, 1);
    SCOPED_TRACE(table->name);
    ExpectInvariant(TinyQwen2Spec(compute()), 12);
    ExpectInvariant(TinyMistralSpec(compute()), 12);
    ExpectInvariant(TinyQuantizedSpec(compute()), 12);
  }
}

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
