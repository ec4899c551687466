// A fork of the engine's process: every call in the fork returns an error that says why, no call
// waits, and the parent is not disturbed.

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <set>
#include <thread>

#include "allspark/model_serializer.h"
#include "cpp/engine/engine_harness.h"
#include "engine/request_spec.h"

namespace allspark::testing {
namespace {

// Runs `work` in a fork. Returns the number of failed checks, or -1 if the fork did not return.
int RunInFork(const std::function<int()>& work) {
  const pid_t child = fork();
  if (child == 0) _exit(work());
  for (int tenths = 0; tenths < 600; ++tenths) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child)
      return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return -1;
}

class Checks {
 public:
  explicit Checks(pid_t parent)
      : message_("engine was created in process " + std::to_string(parent) +
                 " and does not live in process " + std::to_string(getpid()) +
                 ", its fork; create one there") {}
  void Expect(bool passed, const char* what) {
    if (passed) return;
    ++num_failed_;
    fprintf(stderr, "in the fork: %s\n", what);
  }
  void Refused(const Status& status, const char* call) {
    Expect(status.code() == StatusCode::kFailedPrecondition &&
               status.as_status() == AsStatus::kInvalidCallError &&
               status.message() == "this " + message_,
           (std::string(call) + ": " + status.ToString()).c_str());
  }
  int num_failed() const { return num_failed_; }
  const std::string& message() const { return message_; }

 private:
  const std::string message_;
  int num_failed_ = 0;
};

class ForkTest : public EngineTest {
 protected:
  void SetUp() override {
    InstallAndStart(SmallConfig());
    Install(SmallConfig("other"));
    GateSteps();
    gate_.Close();
    request_ = Start({1, 2, 3}, Greedy(8));
    gate_.WaitArrived();
    waiters_.emplace_back([this] { tokens_ = ReadAll(*request_.queue); });
    waiters_.emplace_back([this] { EXPECT_OK(engine_->SyncRequest("m", request_.handle)); });
    waiters_.emplace_back([this] { EXPECT_OK(engine_->SyncAllRequests("m")); });
    // Long enough for the threads to wait; if one does not wait yet, the test is weaker, not wrong.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  void TearDown() override {
    gate_.Open();
    for (std::thread& thread : waiters_) thread.join();
    EXPECT_EQ(tokens_.size(), 8u);
    EXPECT_EQ(Run({1, 2, 3}, Greedy(8)), tokens_);
    hook_.Set({});
  }

  void CheckCalls(Checks& checks) {
    Engine& engine = *engine_;
    const Ids prompt = {1, 2, 3};
    const RequestHandle handle = request_.handle;
    checks.Refused(engine.CheckProcess(), "CheckProcess");
    checks.Refused(engine.RegisterImage("x", image_), "RegisterImage");
    checks.Refused(engine.InstallModel(SmallConfig("x")), "InstallModel");
    checks.Refused(engine.StartModel("other"), "StartModel");
    checks.Refused(engine.StopModel("m"), "StopModel");
    checks.Refused(engine.StopModel("m", StopMode::kDrain), "StopModel");
    checks.Refused(engine.ReleaseModel("other"), "ReleaseModel");
    checks.Refused(engine.UnloadDeviceMemory("m"), "UnloadDeviceMemory");
    checks.Refused(engine.LoadDeviceMemory("m"), "LoadDeviceMemory");
    checks.Refused(engine.GetModelState("m").status(), "GetModelState");
    checks.Refused(engine.GetModelSpec("m").status(), "GetModelSpec");
    checks.Refused(engine.StartRequest("m", prompt, Greedy(8)).status(), "StartRequest");
    checks.Refused(engine.StopRequest("m", handle), "StopRequest");
    checks.Refused(engine.ReleaseRequest("m", handle), "ReleaseRequest");
    checks.Refused(engine.SyncRequest("m", handle), "SyncRequest");
    checks.Refused(engine.SyncRequests("m", {&handle, 1}), "SyncRequests");
    checks.Refused(engine.SyncAllRequests("m"), "SyncAllRequests");
    checks.Refused(engine.LoadLora("m", "a", "a.aslora"), "LoadLora");
    checks.Refused(engine.UnloadLora("m", "a"), "UnloadLora");
    checks.Refused(engine.ListLoras("m").status(), "ListLoras");
    checks.Refused(engine.FindPrefix("m", prompt).status(), "FindPrefix");
    checks.Refused(engine.PinPrefix("m", prompt).status(), "PinPrefix");
    checks.Refused(engine.UnpinPrefix("m", prompt).status(), "UnpinPrefix");
    checks.Refused(engine.ClearPrefixCache("m").status(), "ClearPrefixCache");
    checks.Refused(engine.GetModelInfo("m").status(), "GetModelInfo");
    checks.Refused(engine.GetEngineStat("m").status(), "GetEngineStat");
    checks.Refused(engine.WriteTrace("m", "/dev/null"), "WriteTrace");
    checks.Refused(engine.GetOpProfilingInfo("m").status(), "GetOpProfilingInfo");
    checks.Expect(engine.ListModels().empty(), "ListModels");
    checks.Expect(engine.GetMetrics().empty(), "GetMetrics");
  }

  void CheckQueue(Checks& checks) {
    ResultQueue& queue = *request_.queue;
    checks.Expect(!queue.Get().has_value(), "Get");
    checks.Expect(!queue.Get(1 << 30).has_value(), "Get with a timeout");
    checks.Expect(!queue.GetNoWait().has_value(), "GetNoWait");
    checks.Expect(queue.GenerateStatus() == GenerateRequestStatus::kInternalError,
                  "GenerateStatus");
    checks.Expect(queue.finish_reason() == FinishReason::kError, "finish_reason");
    checks.Expect(queue.error() == "this queue's " + checks.message(), queue.error().c_str());
    checks.Expect(queue.GeneratedLength() == 0, "GeneratedLength");
    checks.Expect(queue.RequestStatInfo().empty(), "RequestStatInfo");
    checks.Expect(!queue.sequence_score().has_value(), "sequence_score");
    checks.Expect(queue.request_id() == request_.handle.id, "request_id");
  }

  const pid_t process_ = getpid();
  const std::shared_ptr<const ModelImage> image_ = MakeRandomModel(TinyLlamaSpec(), 1);
  StartedRequest request_;
  Ids tokens_;
  std::vector<std::thread> waiters_;
};

TEST_F(ForkTest, EveryCallIsRefusedAndNoneWaits) {
  EXPECT_EQ(RunInFork([this] {
              Checks checks(process_);
              CheckCalls(checks);
              CheckQueue(checks);
              return checks.num_failed();
            }),
            0);
}

TEST_F(ForkTest, EngineAndQueueCanBeDeletedInAnyOrder) {
  for (const bool engine_first : {true, false}) {
    EXPECT_EQ(RunInFork([&] {
                if (engine_first) engine_.reset();
                request_ = {};
                engine_.reset();
                return 0;
              }),
              0);
  }
}

TEST_F(ForkTest, TheForkTakesNoCompletionOfItsParent) {
  gate_.Open();
  for (std::thread& thread : waiters_) thread.join();
  waiters_.clear();
  const std::shared_ptr<CompletionSet> set = engine_->completions();
  EXPECT_EQ(RunInFork([&] { return static_cast<int>(set->Drain().size()); }), 0);
  pollfd readable{set->fd(), POLLIN, 0};
  EXPECT_EQ(poll(&readable, 1, 0), 1);
  EXPECT_EQ(set->Drain().size(), 1u);
}

uint64_t DrawnSeed() {
  const RequestLimits limits{.vocab_size = 8, .engine_max_length = 8, .block_size = 16};
  return RequestSpec::Create(1, Ids{1}, GenerationConfig(), limits, false)->sampling.seed;
}

TEST(DrawnSeedTest, NoTwoForksDrawTheSame) {
  const uint64_t first = DrawnSeed();
  auto* const seeds = static_cast<uint64_t*>(mmap(
      nullptr, 2 * sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(seeds, MAP_FAILED);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(RunInFork([&] {
                seeds[i] = DrawnSeed();
                return 0;
              }),
              0);
  }
  const std::set<uint64_t> drawn = {first, seeds[0], seeds[1], DrawnSeed()};
  EXPECT_EQ(drawn.size(), 4u);
  munmap(seeds, 2 * sizeof(uint64_t));
}

TEST_F(ForkTest, AModelThatIsBeingWrittenStaysItsParents) {
  const std::string name = "fork_test_" + std::to_string(process_);
  const std::string path = ::testing::TempDir() + name;
  const std::string graph = path + ".asgraph", param = path + ".asparam";
  const std::string spec = TinyLlamaSpec().SerializeAsString();
  auto serializer = ModelSerializer::Create(spec, "", graph, param);
  ASSERT_OK(serializer.status());
  const auto count_files = [&] {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(::testing::TempDir())) {
      count += entry.path().filename().string().starts_with(name);
    }
    return count;
  };
  const int num_files = count_files();
  EXPECT_GT(num_files, 0);
  EXPECT_EQ(RunInFork([&] {
              const Status status = (*serializer)->Finish().status();
              const bool refused = status.code() == StatusCode::kFailedPrecondition &&
                                   status.message().starts_with("this serializer was created in");
              serializer->reset();
              return refused ? 0 : 1;
            }),
            0);
  EXPECT_EQ(count_files(), num_files);
  serializer->reset();
  EXPECT_EQ(count_files(), 0);
}

}  // namespace
}  // namespace allspark::testing
