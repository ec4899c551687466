// Back-pressure: what StartRequest does while too many requests wait, and the limit on the memory
// of all tensors together.

#include <atomic>
#include <chrono>
#include <deque>
#include <thread>

#include "cpp/engine/engine_harness.h"

namespace allspark::testing {
namespace {

constexpr int64_t kShortMs = 30;

RuntimeConfig OneRunsOneWaits(QueueFullPolicy policy) {
  RuntimeConfig config = SmallConfig();
  config.engine_max_batch = 1;
  config.max_waiting_requests = 1;
  config.queue_full_policy = policy;
  return config;
}

class BackPressureTest : public EngineTest {
 protected:
  ~BackPressureTest() override {
    hook_.loop_gate.Open();
    for (Caller& caller : callers_) caller.thread.join();
  }
  // Starts the model with its step thread held back, and as many requests as the model accepts.
  void Fill(const RuntimeConfig& config) {
    Install(config);
    hook_.loop_gate.Close();
    ASSERT_OK(engine_->StartModel("m"));
    for (int i = 0; i < 2; ++i) Start({1, 2, 3}, Greedy(3));
  }
  // Starts a request on another thread and returns once that thread waits, or has its answer.
  // Without `cancelled` that shows in the number of those that wait: no other may end meanwhile.
  size_t StartBlocked(const GenerationConfig& config = Greedy(3),
                      std::function<bool()> cancelled = nullptr) {
    const int64_t num_blocked = engine_->GetEngineStat("m")->blocked_request;
    Caller& caller = callers_.emplace_back();
    const bool tells = cancelled != nullptr;
    if (tells) {
      cancelled = [&caller, is_cancelled = std::move(cancelled)] {
        caller.waits = true;
        return is_cancelled();
      };
    }
    caller.thread = std::thread([this, &caller, config, cancelled = std::move(cancelled)] {
      Result<StartedRequest> started =
          engine_->StartRequest("m", Ids{4, 5}, config, nullptr, cancelled);
      caller.status = started.status();
      if (started.ok()) caller.request_id = started->handle.id;
      caller.done = true;
    });
    const auto waits = [&] {
      return tells ? caller.waits.load()
                   : engine_->GetEngineStat("m")->blocked_request != num_blocked;
    };
    while (!waits() && !caller.done) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return callers_.size() - 1;
  }
  Status StatusOf(size_t index) {
    while (!callers_[index].done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return callers_[index].status;
  }

  struct Caller {
    std::thread thread;
    std::atomic<bool> waits{false};  // once it was asked whether it is cancelled
    std::atomic<bool> done{false};
    Status status;  // once done
    uint64_t request_id = 0;
  };
  std::deque<Caller> callers_;
};

TEST_F(BackPressureTest, RefusesWhatIsTooMuch) {
  Fill(OneRunsOneWaits(QueueFullPolicy::kRefuse));
  const Status status = engine_->StartRequest("m", Ids{1}, Greedy(1)).status();
  EXPECT_EQ(status.as_status(), AsStatus::kRequestDenied);
  EXPECT_EQ(status.message(), "1 requests are waiting; max_waiting_requests is 1");
  hook_.loop_gate.Open();
  ASSERT_OK(engine_->SyncAllRequests("m"));
  EXPECT_EQ(Run({1}, Greedy(1)).size(), 1u);
}

TEST_F(BackPressureTest, AllSamplesOfARequestCount) {
  RuntimeConfig config = OneRunsOneWaits(QueueFullPolicy::kRefuse);
  config.max_waiting_requests = 3;
  Install(config);
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  GenerationConfig best;
  best.max_new_tokens = 2;
  best.best_of = 4;
  Start({1, 2, 3}, Greedy(3));
  const Status status = engine_->StartRequest("m", Ids{1}, best).status();
  EXPECT_EQ(status.as_status(), AsStatus::kRequestDenied);
  EXPECT_EQ(status.message(),
            "0 requests are waiting; max_waiting_requests is 3; this one has 4 sequences");
  best.best_of = 3;
  Start({1, 2, 3}, best);
  hook_.loop_gate.Open();
  ASSERT_OK(engine_->SyncAllRequests("m"));
  best.best_of = 9;  // more than the bound: only alone
  Start({1, 2, 3}, best);
  ASSERT_OK(engine_->SyncAllRequests("m"));
}

TEST_F(BackPressureTest, BlockedStartsEnterInTheirOrder) {
  Fill(OneRunsOneWaits(QueueFullPolicy::kBlock));
  std::vector<uint64_t> begun;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    if (event.phase != StepPhase::kLogits) return;
    if (begun.empty() || begun.back() != event.request_id) begun.push_back(event.request_id);
  });
  for (int i = 0; i < 6; ++i) StartBlocked();
  EXPECT_EQ(engine_->GetEngineStat("m")->blocked_request, 6);
  EXPECT_EQ(engine_->GetEngineStat("m")->pending_request, 2);
  hook_.loop_gate.Open();
  std::vector<uint64_t> entered;
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_OK(StatusOf(i));
    entered.push_back(callers_[i].request_id);
  }
  ASSERT_OK(engine_->SyncAllRequests("m"));
  EXPECT_EQ(Ids(begun.begin() + 2, begun.end()), Ids(entered.begin(), entered.end()));
  EXPECT_EQ(engine_->GetEngineStat("m")->blocked_request, 0);
}

TEST_F(BackPressureTest, AStopDeniesThoseThatWait) {
  Fill(OneRunsOneWaits(QueueFullPolicy::kBlock));
  StartBlocked();
  StartBlocked();
  hook_.loop_gate.Open();
  ASSERT_OK(engine_->StopModel("m"));
  for (size_t i = 0; i < 2; ++i) {
    const Status status = StatusOf(i);
    // The request may have got room before the stop.
    if (status.ok()) continue;
    EXPECT_EQ(status.as_status(), AsStatus::kRequestDenied);
    EXPECT_NE(status.message().find("stopping"), std::string::npos) << status.message();
  }
  ASSERT_OK(engine_->StartModel("m"));
  EXPECT_EQ(Run({1}, Greedy(1)).size(), 1u);
}

TEST_F(BackPressureTest, AStopThatDrainsDeniesThoseThatWaitAtOnce) {
  Fill(OneRunsOneWaits(QueueFullPolicy::kBlock));
  StartBlocked();
  std::thread stop([&] { EXPECT_OK(engine_->StopModel("m", StopMode::kDrain)); });
  const Status status = StatusOf(0);  // the step thread has not begun
  EXPECT_EQ(status.as_status(), AsStatus::kRequestDenied) << status.ToString();
  hook_.loop_gate.Open();
  stop.join();
}

TEST_F(BackPressureTest, ADeadlineOrTheCallerEndsTheWait) {
  Fill(OneRunsOneWaits(QueueFullPolicy::kBlock));
  GenerationConfig timed = Greedy(3);
  timed.timeout_ms = kShortMs;
  std::atomic<bool> cancelled{false};
  const size_t first = StartBlocked(timed);
  const size_t second = StartBlocked(Greedy(3), [&] { return cancelled.load(); });
  const Status late = StatusOf(first);
  const size_t third = StartBlocked();
  EXPECT_EQ(late.code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(late.as_status(), AsStatus::kRequestDenied);
  EXPECT_NE(late.message().find("timeout_ms"), std::string::npos) << late.message();
  EXPECT_FALSE(callers_[second].done);
  cancelled = true;
  EXPECT_EQ(StatusOf(second).code(), StatusCode::kCancelled);
  EXPECT_FALSE(callers_[third].done);
  EXPECT_EQ(engine_->GetEngineStat("m")->denied_request, 1);  // the caller's own end is no refusal
  hook_.loop_gate.Open();
  EXPECT_OK(StatusOf(third));
}

TEST_F(BackPressureTest, EightThreadsNeverHaveMoreWaitingThanAllowed) {
  RuntimeConfig config = SmallConfig();
  config.engine_max_batch = 2;
  config.max_waiting_requests = 3;
  config.queue_full_policy = QueueFullPolicy::kBlock;
  InstallAndStart(config);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 40; ++i) {
        GenerationConfig generation = Greedy(1 + (i * 7 + t) % 5);
        if (i % 5 == 0) generation.timeout_ms = 1 + i % 3;
        const Result<StartedRequest> started = engine_->StartRequest("m", Ids{1, 2}, generation);
        if (started.ok()) {
          if (i % 7 == 0) EXPECT_OK(engine_->ReleaseRequest("m", started->handle));
        } else {
          EXPECT_EQ(started.status().code(), StatusCode::kDeadlineExceeded);
        }
        const EngineStat stat = *engine_->GetEngineStat("m");
        EXPECT_LE(stat.running_request + stat.pending_request, 5);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_OK(engine_->SyncAllRequests("m"));
  EXPECT_EQ(engine_->GetEngineStat("m")->pending_request, 0);
  EXPECT_EQ(engine_->GetEngineStat("m")->blocked_request, 0);
}

TEST_F(BackPressureTest, TensorsAreBoundedTogether) {
  RuntimeConfig config = SmallConfig();
  GenerationConfig logits = Greedy(4);
  logits.output_logits = OutputRows::kGeneration;
  const int64_t bytes = 4 * TinyLlamaSpec().vocab_size() * 4;
  config.max_output_tensor_bytes = 2 * bytes;
  Install(config);
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  const StartedRequest first = Start({1}, logits);
  Start({1}, logits);
  Start({1}, Greedy(4));  // takes no tensors
  EXPECT_EQ(engine_->GetEngineStat("m")->output_tensor_bytes, 2 * bytes);
  const Status status = engine_->StartRequest("m", Ids{1}, logits).status();
  EXPECT_EQ(status.as_status(), AsStatus::kRequestDenied);
  for (const std::string& word : {"take " + std::to_string(bytes), std::to_string(2 * bytes),
                                  std::string("max_output_tensor_bytes")}) {
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  }
  hook_.loop_gate.Open();
  ASSERT_OK(engine_->SyncAllRequests("m"));
  EXPECT_EQ(engine_->GetEngineStat("m")->output_tensor_bytes, 0);
  EXPECT_EQ(Run({1}, logits).size(), 4u);
  EXPECT_TRUE(first.queue->Get().has_value()) << "what was given out is the caller's";
  logits.max_new_tokens = 9;
  EXPECT_FALSE(engine_->StartRequest("m", Ids{1}, logits).ok()) << "too much alone";
}

}  // namespace
}  // namespace allspark::testing
