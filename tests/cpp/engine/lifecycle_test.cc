// The states of a model: Initial, Running, Stop, Released, and what is refused in each.

#include <atomic>
#include <chrono>
#include <thread>

#include "cpp/engine/engine_harness.h"
#include "platform/affinity.h"
#include "platform/float_mode.h"
#include "support/float_mode.h"
#include "support/process_usage.h"
#include "support/sanitized.h"

namespace allspark::testing {
namespace {

TEST_F(EngineTest, WalksThroughTheDocumentedStates) {
  Install(SmallConfig());
  EXPECT_EQ(*engine_->GetModelState("m"), ModelState::kInitial);
  ASSERT_OK(engine_->StartModel("m"));
  EXPECT_EQ(*engine_->GetModelState("m"), ModelState::kRunning);
  EXPECT_EQ(Run({1, 2, 3}, Greedy(4)).size(), 4u);
  ASSERT_OK(engine_->StopModel("m"));
  EXPECT_EQ(*engine_->GetModelState("m"), ModelState::kStop);
  ASSERT_OK(engine_->StartModel("m"));
  EXPECT_EQ(Run({1, 2, 3}, Greedy(4)).size(), 4u);
  ASSERT_OK(engine_->StopModel("m"));
  ASSERT_OK(engine_->ReleaseModel("m"));
  EXPECT_EQ(engine_->GetModelState("m").status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(engine_->ListModels().empty());
}

TEST_F(EngineTest, RefusesIllegalTransitionsWithTheState) {
  Install(SmallConfig());
  const Status stop = engine_->StopModel("m");
  EXPECT_EQ(stop.as_status(), AsStatus::kInvalidCallError);
  EXPECT_NE(stop.message().find("Initial"), std::string::npos) << stop.message();
  EXPECT_EQ(engine_->StartRequest("m", Ids{1}, Greedy(1)).status().as_status(),
            AsStatus::kInvalidCallError);
  ASSERT_OK(engine_->StartModel("m"));
  EXPECT_NE(engine_->StartModel("m").message().find("Running"), std::string::npos);
  EXPECT_FALSE(engine_->ReleaseModel("m").ok());
  ASSERT_OK(engine_->StopModel("m"));
  EXPECT_FALSE(engine_->StopModel("m").ok());
  EXPECT_FALSE(engine_->StartRequest("m", Ids{1}, Greedy(1)).ok());
}

TEST_F(EngineTest, RefusesUnknownAndDuplicateNames) {
  for (const Status& status :
       {engine_->StartModel("x"), engine_->StopModel("x"), engine_->ReleaseModel("x"),
        engine_->InstallModel(SmallConfig("x")), engine_->SyncAllRequests("x"),
        engine_->StopRequest("x", {1}), engine_->StartRequest("x", Ids{1}, {}).status()}) {
    EXPECT_EQ(status.code(), StatusCode::kNotFound) << status.ToString();
    EXPECT_NE(status.message().find("'x'"), std::string::npos) << status.ToString();
  }
  Install(SmallConfig());
  const Status duplicate = engine_->InstallModel(SmallConfig());
  EXPECT_EQ(duplicate.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(duplicate.message().find("'m'"), std::string::npos);
  EXPECT_EQ(engine_->InstallModel(SmallConfig("")).code(), StatusCode::kInvalidArgument);
}

TEST_F(EngineTest, AReleasedNameCanBeInstalledAgain) {
  auto image = MakeRandomModel(TinyLlamaSpec(), 1);
  ASSERT_OK(engine_->RegisterImage("m", image));
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(engine_->InstallModel(SmallConfig()));
    ASSERT_OK(engine_->StartModel("m"));
    ASSERT_OK(engine_->StopModel("m"));
    ASSERT_OK(engine_->ReleaseModel("m"));
  }
  std::weak_ptr<const ModelImage> watch = image;
  image.reset();
  EXPECT_TRUE(watch.expired()) << "the engine keeps an image that it has released";
  EXPECT_EQ(engine_->InstallModel(SmallConfig()).code(), StatusCode::kNotFound);
}

// A loader registers its image under the model's name and the file's, and again for an install.
TEST_F(EngineTest, AReleasedImageIsGoneUnderAllItsNames) {
  auto image = MakeRandomModel(TinyLlamaSpec(), 1), draft = MakeRandomModel(TinyLlamaSpec(), 2);
  for (const char* name : {"org/m", "org_m", "m"}) {
    ASSERT_OK(engine_->RegisterImage(name, image));
    ASSERT_OK(engine_->RegisterImage(std::string(name) + ".draft", draft));
  }
  RuntimeConfig config = SmallConfig();
  config.draft_model = "m.draft";
  ASSERT_OK(engine_->InstallModel(config));
  const std::weak_ptr<const ModelImage> watch = image, watch_draft = draft;
  image.reset(), draft.reset();
  // While a model holds the image, its other names can be installed, too.
  ASSERT_OK(engine_->InstallModel(SmallConfig("org/m")));
  ASSERT_OK(engine_->ReleaseModel("m"));
  EXPECT_TRUE(watch_draft.expired());
  EXPECT_FALSE(watch.expired());
  ASSERT_OK(engine_->ReleaseModel("org/m"));
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(engine_->InstallModel(SmallConfig("org_m")).code(), StatusCode::kNotFound);
}

TEST_F(EngineTest, ServesSeveralModels) {
  InstallAndStart(SmallConfig("a"), TinyLlamaSpec(), 1);
  const Ids alone = Run({5, 6, 7}, Greedy(16), "a");
  InstallAndStart(SmallConfig("b"), TinyQwen2Spec(), 2);
  EXPECT_EQ(engine_->ListModels(), (std::vector<std::string>{"a", "b"}));
  const StartedRequest a = Start({5, 6, 7}, Greedy(16), "a");
  const StartedRequest b = Start({5, 6, 7}, Greedy(16), "b");
  EXPECT_EQ(ReadAll(*a.queue), alone);
  EXPECT_EQ(ReadAll(*b.queue).size(), 16u);
  // A handle belongs to one model.
  EXPECT_EQ(engine_->StopRequest("b", a.handle).as_status(), AsStatus::kIllegalRequestId);
  ASSERT_OK(engine_->StopModel("a"));
  EXPECT_EQ(Run({1}, Greedy(2), "b").size(), 2u);
}

TEST_F(EngineTest, RefusesAPoolThatCannotHoldOneRequest) {
  RuntimeConfig config = SmallConfig();
  config.num_blocks = 15;  // 256 tokens need 16 blocks of 16
  ASSERT_OK(engine_->RegisterImage("m", MakeRandomModel(TinyLlamaSpec(), 1)));
  const Status status = engine_->InstallModel(config);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("can have 240 tokens (15 blocks of 16, "), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("engine_max_length 256 needs 256 tokens (16 blocks of 16, "),
            std::string::npos)
      << status.message();
  config.num_blocks = int64_t{1} << 30;
  const Status large = engine_->InstallModel(config);
  EXPECT_EQ(large.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(large.message().find("cache_span_num_init is 1073741824, a KV cache pool of "
                                 "17179869184 tokens (1073741824 blocks of 16, "),
            std::string::npos)
      << large.message();
  EXPECT_NE(large.message().find("has room for "), std::string::npos) << large.message();
}

TEST_F(EngineTest, SaysBeforeTheStartWhatAModelTakes) {
  EXPECT_EQ(engine_->GetModelInfo("m").status().code(), StatusCode::kNotFound);
  const auto draft = MakeRandomModel(TinyQwen2Spec(), 2);
  // Bytes of a key and a value: float32; bytes and a scale; half bytes, a scale and a zero point.
  const auto bytes_of = [](CacheMode mode, int64_t head_dim) {
    const int64_t of_8_bits = head_dim + 4, of_4_bits = head_dim / 2 + 5;
    return mode == CacheMode::kDefault   ? head_dim * 8
           : mode == CacheMode::kQuantI8 ? 2 * of_8_bits
           : mode == CacheMode::kQuantU4 ? 2 * of_4_bits
                                         : of_8_bits + of_4_bits;
  };
  for (const CacheMode mode : kCacheModes) {
    for (const bool drafts : {false, true}) {
      SCOPED_TRACE(CacheModeName(mode) + (drafts ? " with a draft model" : ""));
      RuntimeConfig config = SmallConfig();
      config.cache_mode = mode;
      config.num_blocks = 100;
      if (drafts) {
        config.draft_model = "draft";
        ASSERT_OK(engine_->RegisterImage("draft", draft));
      }
      Install(config);
      ASSERT_FALSE(HasFatalFailure());
      const ModelInfo info = *engine_->GetModelInfo("m");
      EXPECT_EQ(info.architecture, "LlamaForCausalLM");
      EXPECT_EQ(info.vocab_size, 131);
      EXPECT_EQ(info.cache_mode, mode);
      EXPECT_EQ(info.total_blocks, 100);
      EXPECT_EQ(info.total_token, 1600);
      EXPECT_EQ(info.num_longest_request, 6);
      // Two layers with 2 KV heads of 16; the draft model's two layers have one of 24.
      EXPECT_EQ(info.bytes_per_token,
                2 * (2 * bytes_of(mode, 16) + (drafts ? bytes_of(mode, 24) : 0)));
      EXPECT_EQ(info.kv_pool_bytes, 1600 * info.bytes_per_token);
      EXPECT_GT(info.weight_bytes, 4 * 2 * 131 * 64);
      const int64_t before = TestingAccess::DeviceStats(*engine_).bytes_in_use;
      ASSERT_OK(engine_->StartModel("m"));
      const int64_t taken = TestingAccess::DeviceStats(*engine_).bytes_in_use - before;
      // A device with memory of its own has copies of the weights.
      const int64_t known =
          info.kv_pool_bytes + info.work_bytes + (testing::kOnSim ? info.weight_bytes : 0);
      // Each of at most six allocations is rounded up, and each tensor.
      EXPECT_GE(taken, known);
      EXPECT_LE(taken, known + (testing::kOnSim ? 60 : 6) * 256);
      const EngineStat stat = *engine_->GetEngineStat("m");
      EXPECT_EQ(stat.total_token, info.total_token);
      EXPECT_EQ(ToString(*engine_->GetModelInfo("m")), ToString(info)) << "running or not";
      ASSERT_OK(engine_->StopModel("m"));
      ASSERT_OK(engine_->ReleaseModel("m"));
    }
  }
}

TEST_F(EngineTest, ACacheModeIsAChoiceOfTheEngineNotOfTheFile) {
  const auto image = MakeRandomModel(TinyLlamaSpec(), 1);
  for (const CacheMode mode : kCacheModes) {
    RuntimeConfig config = SmallConfig(CacheModeName(mode));
    config.cache_mode = mode;
    ASSERT_OK(engine_->RegisterImage(config.model_name, image));
    ASSERT_OK(engine_->InstallModel(config));
    ASSERT_OK(engine_->StartModel(config.model_name));
  }
  const int64_t exact = engine_->GetModelInfo("Default")->kv_pool_bytes;
  EXPECT_LT(engine_->GetModelInfo("Int8")->kv_pool_bytes, exact / 2);
  EXPECT_LT(engine_->GetModelInfo("Uint4")->kv_pool_bytes, exact / 3);
  for (const CacheMode mode : kCacheModes) {
    EXPECT_EQ(Run({1, 2, 3}, Greedy(20), CacheModeName(mode)).size(), 20u);
  }
}

TEST_F(EngineTest, ACacheModeThatDoesNotFitIsRefused) {
  proto::DecoderSpec odd = TinyLlamaSpec();
  odd.set_head_dim(15);
  odd.set_rotary_dim(14);
  ASSERT_OK(engine_->RegisterImage("odd", MakeRandomModel(odd, 1)));
  ASSERT_OK(engine_->RegisterImage("m", MakeRandomModel(TinyLlamaSpec(), 1)));
  RuntimeConfig config = SmallConfig("odd");
  const std::string bound = " and head_dim is 15; elements lie in pairs, which need an even one";
  config.cache_mode = CacheMode::kQuantI8;
  EXPECT_EQ(engine_->InstallModel(config).message(), "cache_mode is AsCacheQuantI8" + bound);
  config.cache_mode = CacheMode::kQuantU4;
  EXPECT_EQ(engine_->InstallModel(config).message(), "cache_mode is AsCacheQuantU4" + bound);
  config.model_name = "m";
  config.draft_model = "odd";
  EXPECT_EQ(engine_->InstallModel(config).message(),
            "draft_model is 'odd', which cannot be used: cache_mode is AsCacheQuantU4" + bound);
  config.cache_mode = CacheMode::kDefault;
  ASSERT_OK(engine_->InstallModel(config));
  ASSERT_OK(engine_->StartModel("m"));
  EXPECT_EQ(Run({1, 2, 3}, Greedy(20)).size(), 20u);
}

TEST_F(EngineTest, RefusesBadRuntimeConfigs) {
  ASSERT_OK(engine_->RegisterImage("m", MakeRandomModel(TinyLlamaSpec(), 1)));
  const auto refused = [&](auto change, const char* field) {
    RuntimeConfig config = SmallConfig();
    change(config);
    const Status status = engine_->InstallModel(config);
    EXPECT_FALSE(status.ok()) << field;
    EXPECT_NE(status.message().find(field), std::string::npos) << status.ToString();
  };
  refused([](RuntimeConfig& c) { c.engine_max_length = 0; }, "engine_max_length");
  refused([](RuntimeConfig& c) { c.engine_max_batch = -1; }, "engine_max_batch");
  refused([](RuntimeConfig& c) { c.block_size = 24; }, "cache_span_size");
  refused([](RuntimeConfig& c) { c.cache_mode = static_cast<CacheMode>(4); }, "cache_mode");
  refused([](RuntimeConfig& c) { c.matmul_precision = MatmulPrecision::kBFloat16; },
          "matmul_precision");
  refused([](RuntimeConfig& c) { c.compute_unit = "TPU:0"; }, "compute_unit");
  refused([](RuntimeConfig& c) { c.model_path = "/nonexistent/m.asgraph"; }, "/nonexistent/m");
  refused([](RuntimeConfig& c) { c.model_path = "/nonexistent/m.bin"; }, "model_path");
  refused([](RuntimeConfig& c) { c.weights_path = "/nonexistent/m.asparam"; },
          "weights_path is '/nonexistent/m.asparam'; it must be empty where model_path is");
}

// Programs set another for a thread, and threads that it makes inherit that.
TEST_F(EngineTest, StepsHaveTheDefaultFloatMode) {
  const FlushedFloats flushed;
  bool is_default = false;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    if (event.phase == StepPhase::kBegin) is_default = DefaultFloatMode::IsHere();
  });
  InstallAndStart(SmallConfig());
  Run({1, 2, 3}, Greedy(2));
  EXPECT_TRUE(is_default);
  EXPECT_FALSE(DefaultFloatMode::IsHere()) << "the caller's own mode stays";
}

TEST_F(EngineTest, StopEndsWhatRuns) {
  InstallAndStart(SmallConfig());
  GateSteps();
  gate_.Close();
  std::vector<StartedRequest> requests;
  for (int i = 0; i < 20; ++i) requests.push_back(Start({1, 2, 3}, Greedy(200)));
  gate_.WaitArrived();
  std::thread opener = OpenOnceBlocked();
  EXPECT_OK(engine_->StopModel("m"));
  opener.join();
  for (const StartedRequest& request : requests) {
    EXPECT_EQ(request.queue->GenerateStatus(), GenerateRequestStatus::kGenerateFinished);
    EXPECT_EQ(request.queue->finish_reason(), FinishReason::kCancelled);
    EXPECT_OK(engine_->SyncRequest("m", request.handle));
    EXPECT_OK(engine_->ReleaseRequest("m", request.handle));
  }
}

// Drains a model on a thread of its own. The drain has begun once a request is denied.
std::thread Drain(Engine& engine, const std::string& model) {
  std::thread drainer([&engine, model] { EXPECT_OK(engine.StopModel(model, StopMode::kDrain)); });
  Status denied;
  while (denied.ok()) denied = engine.StartRequest(model, Ids{1}, Greedy(1)).status();
  EXPECT_EQ(denied.as_status(), AsStatus::kRequestDenied) << denied.ToString();
  return drainer;
}

TEST_F(EngineTest, DrainFinishesWhatRunsAndDeniesTheRest) {
  InstallAndStart(SmallConfig());
  GateSteps();
  gate_.Close();
  std::vector<StartedRequest> requests;
  for (int i = 0; i < 20; ++i) requests.push_back(Start({1, 2, 3}, Greedy(10)));
  gate_.WaitArrived();
  std::thread drainer = Drain(*engine_, "m");
  gate_.Open();
  drainer.join();
  for (const StartedRequest& request : requests) {
    EXPECT_EQ(request.queue->finish_reason(), FinishReason::kLength);
    EXPECT_EQ(ReadAll(*request.queue).size(), 10u);
  }
}

TEST_F(EngineTest, ADrainThatTakesTooLongTurnsIntoACancel) {
  InstallAndStart(SmallConfig());
  // 100 steps of 5 ms each: the drain alone would take half a second.
  hook_.Set([](const StepEvent&) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  const StartedRequest request = Start({1, 2, 3}, Greedy(100));
  ASSERT_OK(engine_->StopModel("m", StopMode::kDrain, /*timeout_ms=*/20));
  EXPECT_TRUE(IsTerminal(request.queue->GenerateStatus()));
}

TEST_F(EngineTest, ADrainWhoseCallerGivesUpTurnsIntoACancel) {
  InstallAndStart(SmallConfig());
  // Once the gate is open, the request would run for 25 seconds.
  hook_.Set([this](const StepEvent& event) {
    if (event.phase != StepPhase::kBegin) return;
    gate_.Pass();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  });
  gate_.Close();
  const StartedRequest request = Start({1, 2, 3}, Greedy(250));
  gate_.WaitArrived();
  int asked = 0;
  const auto cancelled = [&] {
    if (++asked == 2) gate_.Open();
    return asked == 2;
  };
  ASSERT_OK(engine_->StopModel("m", StopMode::kDrain, /*timeout_ms=*/-1, cancelled));
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kCancelled);
}

// A request of 250 tokens takes 25 seconds then: it runs on while the test's threads stand still.
void WaitInStep(const StepEvent& event) {
  if (event.phase == StepPhase::kBegin) std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

TEST_F(EngineTest, ACancelCutsADrainOfAnotherThreadShort) {
  InstallAndStart(SmallConfig());
  hook_.Set(WaitInStep);
  const StartedRequest request = Start({1, 2, 3}, Greedy(250));
  std::thread drainer = Drain(*engine_, "m");
  EXPECT_OK(engine_->StopModel("m"));
  drainer.join();
  EXPECT_EQ(*engine_->GetModelState("m"), ModelState::kStop);
  EXPECT_TRUE(IsTerminal(request.queue->GenerateStatus()));
}

// As a signal's handler does that runs within the drain's own thread.
TEST_F(EngineTest, ACancelMayComeFromTheDrainsOwnQuestion) {
  InstallAndStart(SmallConfig());
  hook_.Set(WaitInStep);
  const StartedRequest request = Start({1, 2, 3}, Greedy(250));
  int asked = 0;
  const auto cancelled = [&] {
    if (++asked > 1) return false;
    for (const Status& status :
         {engine_->StartModel("m"), engine_->StopModel("m", StopMode::kDrain),
          engine_->ReleaseModel("m"), engine_->UnloadDeviceMemory("m"),
          engine_->LoadDeviceMemory("m")}) {
      EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
      EXPECT_NE(status.message().find("'m' is Running; its stop waits"), std::string::npos)
          << status.message();
    }
    EXPECT_OK(engine_->StopModel("m"));
    return false;
  };
  ASSERT_OK(engine_->StopModel("m", StopMode::kDrain, /*timeout_ms=*/-1, cancelled));
  EXPECT_EQ(*engine_->GetModelState("m"), ModelState::kStop);
  EXPECT_EQ(request.queue->finish_reason(), FinishReason::kCancelled);
}

TEST_F(EngineTest, ASecondDrainHasItsOwnLimit) {
  for (const bool by_time : {true, false}) {
    InstallAndStart(SmallConfig());
    hook_.Set(WaitInStep);
    const StartedRequest request = Start({1, 2, 3}, Greedy(250));
    std::thread drainer = Drain(*engine_, "m");
    const auto give_up = [&] { return !by_time; };
    EXPECT_OK(engine_->StopModel("m", StopMode::kDrain, by_time ? 20 : -1, give_up));
    EXPECT_EQ(*engine_->GetModelState("m"), ModelState::kStop);
    drainer.join();
    EXPECT_EQ(request.queue->finish_reason(), FinishReason::kCancelled);
    ASSERT_OK(engine_->ReleaseModel("m"));
  }
}

TEST_F(EngineTest, ARefusalSaysThatTheModelIsStopping) {
  InstallAndStart(SmallConfig());
  std::atomic<bool> ends{false};
  std::atomic<int> num_refused{0};
  std::vector<std::string> messages;
  std::thread starter([&] {
    while (!ends) {
      if (*engine_->GetModelState("m") != ModelState::kRunning) continue;
      const Status status = engine_->StartRequest("m", Ids{1}, Greedy(1)).status();
      if (status.ok()) continue;
      messages.push_back(status.message());
      ++num_refused;
    }
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (int i = 0; i < 20 || (num_refused == 0 && std::chrono::steady_clock::now() < end); ++i) {
    ASSERT_OK(engine_->StopModel("m"));
    ASSERT_OK(engine_->StartModel("m"));
  }
  ends = true;
  starter.join();
  EXPECT_GT(num_refused, 0);
  for (const std::string& message : messages) {
    EXPECT_EQ(message.find("is Running; a request needs it Running"), std::string::npos) << message;
  }
}

TEST_F(EngineTest, NothingWaitsForADrain) {
  InstallAndStart(SmallConfig("a"));
  GateSteps();
  gate_.Close();
  const StartedRequest request = Start({1, 2, 3}, Greedy(5), "a");
  gate_.WaitArrived();
  std::thread drainer = Drain(*engine_, "a");
  // The drain begins to wait a moment after it denies requests; until then these calls wait.
  EXPECT_EQ(engine_->ReleaseModel("a").code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine_->StartModel("a").code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine_->UnloadDeviceMemory("a").code(), StatusCode::kFailedPrecondition);
  gate_.Open();
  drainer.join();
  EXPECT_EQ(ReadAll(*request.queue).size(), 5u);
  EXPECT_OK(engine_->ReleaseModel("a"));
}

TEST_F(EngineTest, AnotherModelStartsWhileOneDrains) {
  InstallAndStart(SmallConfig("a"));
  GateSteps();
  gate_.Close();
  const StartedRequest request = Start({1, 2, 3}, Greedy(5), "a");
  gate_.WaitArrived();
  std::thread drainer([this] { EXPECT_OK(engine_->StopModel("a", StopMode::kDrain)); });
  ASSERT_OK(engine_->RegisterImage("b", MakeRandomModel(TinyQwen2Spec(), 2)));
  ASSERT_OK(engine_->InstallModel(SmallConfig("b")));
  ASSERT_OK(engine_->StartModel("b"));
  EXPECT_EQ(Run({1}, Greedy(2), "b").size(), 2u);
  gate_.Open();
  drainer.join();
  EXPECT_EQ(ReadAll(*request.queue).size(), 5u);
}

TEST_F(EngineTest, TheStepThreadKeepsOffTheWorkersCores) {
  std::vector<int> others = AffinityCores();
  if (others.size() < 2) GTEST_SKIP() << "one core only";
  others.erase(others.begin() + 1);  // of the only worker, as SmallConfig has two threads
  std::vector<int> seen;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    if (event.phase == StepPhase::kBegin) seen = AffinityCores();
  });
  InstallAndStart(SmallConfig());
  Run({1, 2, 3}, Greedy(2));
  EXPECT_EQ(seen, others);
}

TEST_F(EngineTest, StartingAndStoppingLeaksNothing) {
  Install(SmallConfig());
  int64_t resident_early = 0;
  AllocatorStats before = TestingAccess::DeviceStats(*engine_);
  for (int i = 0; i < 200; ++i) {
    ASSERT_OK(engine_->StartModel("m"));
    EXPECT_EQ(Run({1, 2, 3, 4}, Greedy(3)).size(), 3u);
    ASSERT_OK(engine_->StopModel("m"));
    const AllocatorStats now = TestingAccess::DeviceStats(*engine_);
    ASSERT_EQ(now.num_live, before.num_live) << "after start " << i;
    ASSERT_EQ(now.bytes_in_use, before.bytes_in_use) << "after start " << i;
    if (i == 50) resident_early = ReadMemoryUsage().resident_bytes;
  }
  // 150 more rounds: a leak of a KV pool (over 1 MiB) or of a thread stack per round would be far
  // above the limit. (A sanitizer keeps freed memory for a while, to detect uses of it.)
  if (!AS_SANITIZED) {
    EXPECT_LT(ReadMemoryUsage().resident_bytes - resident_early, 16 << 20);
  }
}

TEST_F(EngineTest, AnEngineDestroyedFirstEndsItsRequests) {
  InstallAndStart(SmallConfig());
  std::vector<StartedRequest> requests;
  for (int i = 0; i < 12; ++i) requests.push_back(Start({1, 2, 3}, Greedy(200)));
  std::thread reader([&] { ReadAll(*requests[0].queue); });
  engine_.reset();
  reader.join();
  for (const StartedRequest& request : requests) {
    EXPECT_TRUE(IsTerminal(request.queue->GenerateStatus()));
    const Ids rest = ReadAll(*request.queue);
    EXPECT_LE(rest.size(), request.queue->GeneratedLength());
    EXPECT_FALSE(request.queue->RequestStatInfo().empty());
  }
}

}  // namespace
}  // namespace allspark::testing
