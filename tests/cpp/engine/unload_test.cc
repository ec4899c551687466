// A model whose memory is unloaded for a while: what runs then, what is refused, and what the model
// keeps.

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cpp/engine/engine_harness.h"
#include "cpp/engine/function_mask.h"
#include "platform/system_limits.h"
#include "support/environment.h"
#include "support/process_usage.h"
#include "support/sanitized.h"

namespace allspark::testing {
namespace {

class UnloadTest : public EngineTest {
 protected:
  int64_t BytesInUse() { return TestingAccess::DeviceStats(*engine_).bytes_in_use; }
  void ExpectRefused(const Status& status, const std::string& message) {
    EXPECT_EQ(status.as_status(), AsStatus::kInvalidCallError);
    EXPECT_EQ(status.message(), message);
  }
  // Starts one request of each kind that has state of its own.
  std::vector<StartedRequest> StartAll() {
    std::vector<StartedRequest> requests;
    std::mt19937 rng(3);
    for (int i = 0; i < 7; ++i) {
      GenerationConfig config = Greedy(100);
      std::shared_ptr<TokenMask> mask;
      if (i == 1 || i == 4) {
        config.do_sample = true;
        config.seed = i;
        config.frequency_penalty = 0.5;
        config.output_logits = OutputRows::kAll;
      }
      if (i == 2) config.num_beams = 2;
      if (i == 3) config.do_sample = true, config.best_of = 2, config.seed = 5;
      if (i == 4) config.prompt_lookup_num_tokens = 4;
      if (i == 5) mask = ThirdsMask();
      config.logprobs = true;
      const Ids prompt = RandomPrompt(rng, 20 + 15 * i, vocab_size_);
      requests.push_back(*engine_->StartRequest("m", prompt, config, std::move(mask)));
    }
    return requests;
  }
  struct Outcome {
    Ids tokens;
    std::vector<float> logprobs;
    uint64_t tensors = 0;
    bool operator==(const Outcome&) const = default;
  };
  std::vector<Outcome> ReadOutcomes(const std::vector<StartedRequest>& requests) {
    std::vector<Outcome> outcomes;
    for (const StartedRequest& request : requests) {
      Outcome outcome;
      while (auto elements = request.queue->Get()) {
        const Ids& ids = elements->ids_from_generate;
        outcome.tokens.insert(outcome.tokens.end(), ids.begin(), ids.end());
        const std::vector<float>& logprobs = elements->token_logprobs_list;
        outcome.logprobs.insert(outcome.logprobs.end(), logprobs.begin(), logprobs.end());
        for (const auto& map : elements->tensors_from_model_inference) {
          for (const auto& [name, tensor] : map) {
            const auto rows = static_cast<size_t>(tensor.shape[0]);
            for (size_t row = 0; row < rows; ++row) {  // however many come at once
              const auto cols = static_cast<size_t>(tensor.shape[1]);
              outcome.tensors = XXH3_64bits_withSeed(tensor.data.get() + row * cols,
                                                     cols * sizeof(float), outcome.tensors);
            }
          }
        }
      }
      EXPECT_EQ(request.queue->finish_reason(), FinishReason::kLength) << request.queue->error();
      outcomes.push_back(std::move(outcome));
    }
    return outcomes;
  }
};

TEST_F(UnloadTest, RequestsGoOnAfterTheLoadBitForBit) {
  RuntimeConfig config = SmallConfig();
  config.draft_model = "draft";
  ASSERT_OK(engine_->RegisterImage("draft", MakeRandomModel(TinyLlamaSpec(), 2)));
  InstallAndStart(config);
  const std::vector<Outcome> expected = ReadOutcomes(StartAll());
  const int64_t loaded_bytes = BytesInUse();
  ASSERT_GT(loaded_bytes, 0);
  for (const int64_t at : {1, 9, 60}) {
    const std::vector<StartedRequest> requests = UnloadInStep(at, [&] { return StartAll(); });
    EXPECT_EQ(BytesInUse(), 0);
    const EngineStat stat = *engine_->GetEngineStat("m");
    EXPECT_EQ(stat.used_blocks + stat.cached_blocks, 0);
    EXPECT_EQ(stat.running_request, 0);
    EXPECT_EQ(*engine_->GetModelState("m"), ModelState::kRunning);
    ASSERT_OK(engine_->LoadDeviceMemory("m"));
    EXPECT_EQ(BytesInUse(), loaded_bytes);
    EXPECT_EQ(ReadOutcomes(requests), expected) << "unloaded in step " << at;
  }
}

TEST_F(UnloadTest, WhatComesMeanwhileWaitsButCanBeStopped) {
  InstallAndStart(SmallConfig());
  const Ids expected = Run({1, 2, 3}, Greedy(20));
  EXPECT_OK(engine_->UnloadDeviceMemory("m"));
  const int64_t steps = engine_->GetEngineStat("m")->num_steps;
  const StartedRequest waiting = Start({1, 2, 3}, Greedy(20));
  const StartedRequest stopped = Start({1, 2, 3}, Greedy(20));
  GenerationConfig timed = Greedy(20);
  timed.timeout_ms = 20;
  const StartedRequest expiring = Start({1, 2, 3}, timed);
  EXPECT_OK(engine_->StopRequest("m", stopped.handle));
  EXPECT_OK(engine_->SyncRequest("m", stopped.handle));
  EXPECT_EQ(stopped.queue->finish_reason(), FinishReason::kCancelled);
  EXPECT_OK(engine_->SyncRequest("m", expiring.handle));
  EXPECT_EQ(expiring.queue->finish_reason(), FinishReason::kDeadline);
  EXPECT_EQ(waiting.queue->GenerateStatus(), GenerateRequestStatus::kInit);
  EXPECT_EQ(engine_->GetEngineStat("m")->pending_request, 1);
  EXPECT_EQ(engine_->GetEngineStat("m")->num_steps, steps);
  // The cache answers queries; it is empty and has no pins.
  EXPECT_EQ(*engine_->FindPrefix("m", Ids(64, 1)), 0);
  EXPECT_OK(engine_->LoadDeviceMemory("m"));
  EXPECT_EQ(ReadAll(*waiting.queue), expected);

  // stop_model ends a request that waits for memory like any other.
  EXPECT_OK(engine_->UnloadDeviceMemory("m"));
  const StartedRequest ended = Start({1, 2, 3}, Greedy(20));
  EXPECT_OK(engine_->StopModel("m"));
  EXPECT_EQ(ended.queue->finish_reason(), FinishReason::kCancelled);
  EXPECT_OK(engine_->StartModel("m"));
  EXPECT_EQ(Run({1, 2, 3}, Greedy(20)), expected) << "a start takes memory";
}

TEST_F(UnloadTest, IsRefusedInOtherStates) {
  Install(SmallConfig());
  ExpectRefused(engine_->UnloadDeviceMemory("m"),
                "unload_device_mem: model 'm' is Initial; it must be Running");
  ASSERT_OK(engine_->StartModel("m"));
  ExpectRefused(engine_->LoadDeviceMemory("m"),
                "load_device_mem: model 'm' is loaded; unload_device_mem comes first");
  ASSERT_OK(engine_->UnloadDeviceMemory("m"));
  ExpectRefused(engine_->UnloadDeviceMemory("m"),
                "unload_device_mem: model 'm' is unloaded; load_device_mem comes first");
  ExpectRefused(engine_->StopModel("m", StopMode::kDrain),
                "stop_model with drain: model 'm' is unloaded; load_device_mem comes first");
  ASSERT_OK(engine_->StopModel("m"));
  ExpectRefused(engine_->LoadDeviceMemory("m"),
                "load_device_mem: model 'm' is Stop; it must be Running");
  EXPECT_EQ(engine_->UnloadDeviceMemory("x").code(), StatusCode::kNotFound);
}

TEST_F(UnloadTest, AModelStaysUnloadedWhereMemoryIsShort) {
  // A region with room for one of two models.
  const int64_t mib = int64_t{1} << 20;
  const double ratio = 48.0 * static_cast<double>(mib) / static_cast<double>(TotalMemory().bytes);
  const ScopedVariable region("BFC_MEM_RATIO", std::to_string(ratio));
  const ScopedVariable leftover("BFC_LEFTOVER_MB", "0");
  for (const char* name : {"m", "other"}) {
    RuntimeConfig config = SmallConfig(name);
    config.num_blocks = 26 * mib / (16 * 512);  // 512 bytes a token
    Install(config);
  }
  ASSERT_OK(engine_->StartModel("m"));
  const Ids expected = Run({1, 2, 3}, Greedy(20));
  EXPECT_EQ(engine_->StartModel("other").code(), StatusCode::kResourceExhausted);
  ASSERT_OK(engine_->UnloadDeviceMemory("m"));
  const StartedRequest waiting = Start({1, 2, 3}, Greedy(20));
  ASSERT_OK(engine_->StartModel("other"));
  EXPECT_EQ(engine_->LoadDeviceMemory("m").code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(Run({1, 2, 3}, Greedy(20), "other").size(), 20u);
  ASSERT_OK(engine_->UnloadDeviceMemory("other"));
  ASSERT_OK(engine_->LoadDeviceMemory("m"));
  EXPECT_EQ(ReadAll(*waiting.queue), expected);
}

TEST_F(UnloadTest, TheSystemGetsTheMemory) {
#if AS_SANITIZED
  GTEST_SKIP() << "a sanitizer keeps memory of its own";
#endif
  proto::DecoderSpec deep = TinyLlamaSpec();
  deep.set_num_layers(24);
  RuntimeConfig config = SmallConfig();
  config.prefix_cache_ttl = 1000;
  InstallAndStart(config, deep);
  // Eight times 240 tokens of 24 layers with 256 bytes each; all stay in the cache.
  for (int i = 0; i < 8; ++i) Run(RandomPrompt(rng_, 240, vocab_size_), Greedy(8));
  const int64_t bytes = int64_t{8} * 240 * 24 * 256;
  const int64_t before = ReadMemoryUsage().resident_bytes;
  ASSERT_OK(engine_->UnloadDeviceMemory("m"));
  EXPECT_LT(ReadMemoryUsage().resident_bytes, before - bytes * 9 / 10);
  ASSERT_OK(engine_->LoadDeviceMemory("m"));
}

}  // namespace
}  // namespace allspark::testing
