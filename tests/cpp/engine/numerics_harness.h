// Shared by the tests of the engine's numerics: runs requests alone and together in fresh engines,
// and compares their tokens and the bits of their logits.
#pragma once

#include "cpp/engine/engine_harness.h"
#include "support/must.h"
#include "support/test_tables.h"

namespace allspark::testing {

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
    TestingAccess::SetKernelTable(engine, table);
    digests_.clear();
    Must(engine.RegisterImage(config.model_name, image));
    if (draft_image != nullptr) Must(engine.RegisterImage(config.draft_model, draft_image));
    Must(engine.InstallModel(config));
    hook_.Set([this](const StepEvent& event) { OnEvent(event); });
    Must(TestingAccess::SetStepHook(engine, config.model_name, std::ref(hook_)));
    hook_.loop_gate.Close();
    Must(engine.StartModel(config.model_name));
    std::vector<StartedRequest> requests;
    for (const Job& job : jobs) {
      requests.push_back(Must(engine.StartRequest(config.model_name, job.prompt, job.config)));
    }
    hook_.loop_gate.Open();
    std::vector<Trace> traces(jobs.size());
    for (size_t i = 0; i < jobs.size(); ++i) traces[i].tokens = ReadAll(*requests[i].queue);
    const EngineStat stat = *engine.GetEngineStat(config.model_name);
    preemptions_ = stat.num_preemptions;
    accepted_drafts_ = stat.total_accepted_draft_token;
    drafts_ = stat.total_draft_token;
    Must(engine.StopModel(config.model_name));
    for (size_t i = 0; i < jobs.size(); ++i) traces[i].digests = digests_[requests[i].handle.id];
    return traces;
  }
  const kernels::KernelTable* table = nullptr;  // null: this processor's

  int64_t preemptions() const { return preemptions_; }
  int64_t drafts() const { return drafts_; }
  int64_t accepted_drafts() const { return accepted_drafts_; }

 private:
  void OnEvent(const StepEvent& event) {
    if (event.phase != StepPhase::kLogits) return;
    digests_[event.request_id].push_back(LogitsDigest(event));
  }
  Hook hook_;
  std::map<uint64_t, std::vector<uint64_t>> digests_;
  int64_t preemptions_ = 0, drafts_ = 0, accepted_drafts_ = 0;
};

inline Job MakeJob(std::mt19937& rng, int64_t vocab_size, bool sampled) {
  Job job;
  job.prompt = RandomPrompt(rng, 1 + static_cast<int64_t>(rng() % 100), vocab_size);
  // Long enough that requests running together outgrow the blocks that they were admitted with.
  job.config = Greedy(4 + static_cast<int64_t>(rng() % 60));
  if (sampled) {
    job.config.do_sample = true;
    job.config.temperature = 0.9;
    job.config.top_p = 0.95;
    job.config.seed = static_cast<int64_t>(rng() % 1000);
  }
  return job;
}

// `crowd` requests together give the same output as each gives alone: for any chunks, blocks and
// threads, and under preemption.
inline void ExpectInvariant(const proto::DecoderSpec& spec, int crowd, RuntimeConfig config,
                            const kernels::KernelTable* table = nullptr) {
  std::mt19937 rng(11);
  const auto image = MakeRandomModel(spec, 5);
  config.engine_max_batch = crowd;
  std::vector<Job> jobs;
  for (int i = 0; i < crowd; ++i) jobs.push_back(MakeJob(rng, spec.vocab_size(), i % 2 == 1));

  Runner runner;
  runner.table = table;
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
      changed.block_size = chunk == 7 ? 64 : 16;
      changed.prefill_policy = static_cast<PrefillPolicy>((chunk + threads) % 4);
      const std::vector<Trace> together = runner.Run(changed, image, jobs);
      for (size_t i = 0; i < jobs.size(); ++i) {
        EXPECT_EQ(together[i].tokens, alone[i].tokens)
            << "job " << i << " of " << crowd << ", chunk " << chunk << ", threads " << threads;
        EXPECT_EQ(together[i].digests, alone[i].digests)
            << "job " << i << " of " << crowd << ", chunk " << chunk << ", threads " << threads;
      }
    }
  }
  // The pool holds one longest request: the others are preempted over and over.
  RuntimeConfig tight = config;
  tight.num_blocks = 16;
  const std::vector<Trace> squeezed = runner.Run(tight, image, jobs);
  EXPECT_GT(runner.preemptions(), 0) << crowd;
  for (size_t i = 0; i < jobs.size(); ++i) {
    EXPECT_EQ(squeezed[i].tokens, alone[i].tokens) << "job " << i << " under pressure";
    // A preempted request recomputes positions, but each gives logits once and in order.
    EXPECT_EQ(squeezed[i].digests, alone[i].digests) << "job " << i << " under pressure";
  }
}

}  // namespace allspark::testing
