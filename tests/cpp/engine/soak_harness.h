// The soak: rounds of random requests (soak_jobs.h) against one engine whose KV pool is too small
// for them, with stops and releases at random moments, faults (soak_faults.h) and models that stop.
// Every request ends, gives the same output as alone in a fresh engine or a prefix of it, and
// leaves nothing behind. Each end, feature and fault occurs (soak_coverage.h).
//
// The seed also decides what the engine does when it is full. With an odd seed, requests end when
// blocks run out. With seed / 2 odd, callers wait for room in the queue.
//
// Half of the rounds run in lockstep: the caller acts on the step thread between steps, so that the
// round follows from the seed and can be repeated. In the other rounds four threads call while the
// engine runs; a seed then gives the same requests at different times.
//
//   ALLSPARK_SOAK_SEED=N     the seed, which every failure names
//   ALLSPARK_SOAK_LOCKSTEP=1 lockstep alone
//   ALLSPARK_SOAK_SECONDS=N  of the long form, for each combination
#pragma once

#include <malloc.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "cpp/engine/engine_harness.h"
#include "cpp/engine/fake_device.h"
#include "cpp/engine/soak_client.h"
#include "cpp/engine/soak_faults.h"
#include "support/environment.h"
#include "support/process_usage.h"
#include "support/random_lora.h"
#include "support/sanitized.h"

namespace allspark::testing {

inline int64_t SoakSetting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

class Soak {
 public:
  // `lockstep`: all rounds will run in lockstep.
  Soak(proto::ComputeType compute, CacheMode cache_mode, uint64_t seed, bool lockstep)
      : seed_(seed),
        draw_(seed),
        beginnings_(DrawBeginnings(draw_)),
        interrupts_(seed % 2 == 1),
        // In lockstep the waiting caller would be the thread that makes room.
        blocks_(seed / 2 % 2 == 1 && !lockstep) {
    // A draft model that mostly agrees: it has the model's first layers in the other compute type,
    // and the model's other layers add nothing.
    proto::DecoderSpec spec = TinyQwen2Spec(compute);
    spec.set_num_layers(8);
    image_ = MakeRandomModel(spec, 5, /*silent_from=*/2);
    draft_image_ =
        MakeRandomModel(TinyQwen2Spec(compute == proto::COMPUTE_FLOAT32 ? proto::COMPUTE_BFLOAT16
                                                                        : proto::COMPUTE_FLOAT32),
                        5);
    for (const char* name : {"a", "b"}) {
      loras_[name] = RandomLora(static_cast<uint64_t>(name[0])).AddAll(spec, 4).ToImage();
    }
    config_ = SmallConfig();
    config_.engine_max_length = kSoakMaxLength;
    config_.cache_mode = cache_mode;
  }
  ~Soak() { hook_.Set({}); }
  Soak(const Soak&) = delete;
  Soak& operator=(const Soak&) = delete;

  void Start() {
    RuntimeConfig config = config_;
    config.draft_model = "draft";
    config.interrupt_on_cache_exhaustion = interrupts_;
    config.max_waiting_requests = 12;
    config.prefill_policy = static_cast<PrefillPolicy>(seed_ % 4);
    config.queue_full_policy = blocks_ ? QueueFullPolicy::kBlock : QueueFullPolicy::kRefuse;
    config.max_output_tensor_bytes = 600 << 10;
    config.token_mask_timeout_ms = kMaskTimeoutMs;
    config.num_blocks = kSoakMaxLength / config.block_size + 2;
    const CacheRatio cache_ratio("0.0005");
    TestingAccess::SetAllocator(engine_, faults_.allocator());
    UseFakeDevice(engine_, faults_.link());
    ASSERT_OK(engine_.RegisterImage("draft", draft_image_));
    ASSERT_OK(engine_.RegisterImage("m", image_));
    ASSERT_OK(engine_.InstallModel(config));
    ASSERT_OK(TestingAccess::SetStepHook(engine_, "m", std::ref(hook_)));
    ListenToSteps({});
    ASSERT_OK(engine_.StartModel("m"));
    for (const auto& lora : loras_) ASSERT_OK(engine_.LoadLora("m", lora.first, lora.second));
    at_start_ = Measure();
  }

  void Round(int64_t num_jobs, bool lockstep) {
    lockstep = lockstep && !blocks_;
    SCOPED_TRACE("seed " + std::to_string(seed_) + ", round " + std::to_string(num_rounds_) +
                 (lockstep ? ", in lockstep" : ", in threads"));
    injects_ = draw_.Chance(0.5);
    faults_.Begin(injects_, draw_.Seed());
    std::vector<SoakJob> jobs;
    for (int64_t i = 0; i < num_jobs; ++i) {
      jobs.push_back(DrawJob(draw_, beginnings_));
      // In lockstep nothing may depend on speed.
      int64_t& timeout_ms = jobs.back().config.timeout_ms;
      if (lockstep && timeout_ms > 0) timeout_ms = 1000000;
    }
    if (lockstep) {
      RunInLockstep(std::move(jobs));
    } else {
      RunInThreads(std::move(jobs));
    }
    ExpectNothingLeft();
    ++num_rounds_;
  }

  // The coverage of all rounds so far.
  SoakCoverage Coverage() {
    SoakCoverage coverage = coverage_;
    coverage.Add(faults_.Coverage());
    return coverage;
  }
  int64_t num_rounds() const { return num_rounds_; }
  // After a few rounds, for a later ExpectBoundedHeap.
  void NoteHeap() {
    FinishDeviceWork();
    heap_noted_ = HeapBytes();
  }
  void ExpectBoundedHeap() {
    FinishDeviceWork();
    // After hundreds of requests, even a leaked handle per request would exceed this limit.
    if (!AS_SANITIZED) {
      EXPECT_LT(HeapBytes() - heap_noted_, 256 << 10);
    }
  }

 private:
  static constexpr int kNumThreads = 4;
  // The time that a provider has for a mask: short in the soak, where some masks never come.
  // Requests alone do not test the timeout; there a provider has as long as a busy machine may
  // need.
  static constexpr int64_t kMaskTimeoutMs = 100, kLongMaskTimeoutMs = 60000;

  // Resources that a running model holds; no request may leave more behind.
  struct Held {
    int64_t device_bytes = 0, num_device_allocs = 0, num_threads = 0, num_descriptors = 0;
    bool IsWithin(const Held& other) const {
      return device_bytes == other.device_bytes && num_device_allocs == other.num_device_allocs &&
             num_threads <= other.num_threads && num_descriptors == other.num_descriptors;
    }
  };
  Held Measure() {
    const AllocatorStats stats = TestingAccess::DeviceStats(engine_);
    return {stats.bytes_in_use, stats.num_live, NumThreads(), NumDescriptors()};
  }
  // Operations of the last steps may wait on the device, with what they need. A token comes after
  // all of them.
  void FinishDeviceWork() {
    const Result<StartedRequest> request = engine_.StartRequest("m", Ids{1, 2}, Greedy(1));
    ASSERT_OK(request.status());
    EXPECT_EQ(ReadAll(*request->queue).size(), 1u);
  }

  static int64_t HeapBytes() {
    const struct mallinfo2 info = mallinfo2();
    return static_cast<int64_t>(info.uordblks + info.hblkhd);
  }

  // `at_begin` is called at the start of each step, before its faults.
  void ListenToSteps(std::function<void()> at_begin) {
    hook_.Set([this, at_begin = std::move(at_begin)](const StepEvent& event) {
      faults_.EndLast(event);
      if (event.phase == StepPhase::kBegin && at_begin) at_begin();
      faults_.OnStep(event);
    });
  }

  void RunInLockstep(std::vector<SoakJob> jobs) {
    SoakClient client(engine_, masks_, std::move(jobs), draw_.Seed(), /*may_wait=*/false, injects_);
    std::mutex mutex;  // of client and draw
    Draw draw(draw_.Seed());
    ListenToSteps([&] {
      std::lock_guard lock(mutex);
      for (int64_t i = draw.Below(5); i > 0 && !client.done(); --i) client.Tick();
    });
    // Without requests there are no steps to act in.
    for (bool done = false; !done;) {
      {
        std::lock_guard lock(mutex);
        if (client.IsIdle()) client.Tick();
        done = client.done();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    ListenToSteps({});
    Verify(client, /*model_stopped=*/false);
  }

  void RunInThreads(std::vector<SoakJob> jobs) {
    std::vector<std::unique_ptr<SoakClient>> clients;
    std::vector<std::thread> threads;
    for (int t = 0; t < kNumThreads; ++t) {
      std::vector<SoakJob> share;
      for (size_t i = static_cast<size_t>(t); i < jobs.size(); i += kNumThreads) {
        share.push_back(jobs[i]);
      }
      clients.push_back(std::make_unique<SoakClient>(engine_, masks_, std::move(share),
                                                     draw_.Seed(), /*may_wait=*/true, injects_));
      threads.emplace_back([client = clients.back().get(), draw = Draw(draw_.Seed())]() mutable {
        while (!client->done()) {
          client->Tick();
          if (draw.Chance(0.5)) {
            std::this_thread::sleep_for(std::chrono::microseconds(draw.Below(500)));
          }
        }
      });
    }
    std::atomic<bool> ended{false};
    std::thread other([&, draw = Draw(draw_.Seed())]() mutable {
      while (!ended) CallSomething(draw);
    });
    const bool stops = draw_.Chance(0.3);
    if (stops) {
      std::this_thread::sleep_for(std::chrono::milliseconds(draw_.Below(300)));
      const StopMode mode = draw_.Chance(0.5) ? StopMode::kCancel : StopMode::kDrain;
      EXPECT_OK(engine_.StopModel("m", mode, draw_.Below(20)));
    }
    for (std::thread& thread : threads) thread.join();
    ended = true;
    other.join();
    (void)engine_.UnloadLora("m", "c");
    if (stops) {
      NoteStat();  // the start resets the statistics
      faults_.StartUnderFaults(draw_, [this] { return engine_.StartModel("m"); });
    }
    for (const auto& client : clients) Verify(*client, stops);
  }

  // Another thread's calls to the engine meanwhile.
  void CallSomething(Draw& draw) {
    const std::vector<int64_t> beginning = draw.Pick(beginnings_);
    switch (draw.Below(8)) {
      case 0:
        (void)engine_.PinPrefix("m", beginning);
        break;
      case 1:
        (void)engine_.UnpinPrefix("m", beginning);
        break;
      case 2:
        (void)engine_.ClearPrefixCache("m");
        break;
      case 3:
        (void)engine_.GetEngineStat("m");
        break;
      case 4:
        (void)engine_.LoadLora("m", "c", loras_.at("a"));
        break;
      case 5:
        (void)engine_.UnloadLora("m", "c");
        break;
      case 6:
        for (const auto& queue : engine_.completions()->Drain()) (void)queue->RequestStatInfo();
        break;
      default:
        (void)engine_.FindPrefix("m", beginning);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(draw.Below(2000)));
  }

  void Verify(const SoakClient& client, bool model_stopped) {
    coverage_.Add(client.coverage());
    for (size_t i = 0; i < client.jobs().size(); ++i) {
      const SoakOutcome& outcome = client.outcomes()[i];
      if (outcome.empty()) {
        EXPECT_TRUE(model_stopped || !blocks_ || MayBeDenied(client.jobs()[i]))
            << "a request was denied";
        continue;
      }
      const SoakJob& job = client.jobs()[i];
      SCOPED_TRACE("request " + std::to_string(i) + ": " + job.Describe());
      const SoakOutcome alone = RunAlone(job);
      ASSERT_EQ(outcome.size(), alone.size());
      for (size_t s = 0; s < outcome.size(); ++s) {
        const SoakSequence& got = outcome[s];
        coverage_.Count(SoakCoverage::EndName(got.reason));
        if (got.reason == FinishReason::kError && job.mask_answers >= MaskAnswers::kNever &&
            got.error == alone[s].error) {
          coverage_.Count(kMaskAnswersNames[static_cast<int>(job.mask_answers)]);
        }
        EXPECT_EQ(Difference(got, alone[s], !EndedEarly(got, job, model_stopped)), "")
            << "of sequence " << s << ", which ended by " << FinishReasonName(got.reason) << " "
            << got.error << " after " << got.ids.size() << " tokens; alone by "
            << FinishReasonName(alone[s].reason) << " " << alone[s].error << " after "
            << alone[s].ids.size();
      }
    }
  }

  // If callers wait for room, a job may be denied only for its tensors' memory or its deadline.
  static bool MayBeDenied(const SoakJob& job) {
    return !job.CanResume() || job.config.timeout_ms > 0;
  }

  // Whether the request may have ended by something that does not occur when it runs alone.
  bool EndedEarly(const SoakSequence& got, const SoakJob& job, bool model_stopped) const {
    switch (got.reason) {
      case FinishReason::kCancelled:
        return model_stopped || job.fate != SoakJob::Fate::kEnd;
      case FinishReason::kError:
        return (injects_ && SoakFaults::IsInjected(got.error)) ||
               // An answer from a thread may be late on a busy machine.
               (job.mask_stride > 0 && got.error.find("did not come") != std::string::npos);
      case FinishReason::kInterrupted:
        return interrupts_ || job.config.num_beams > 1;  // which may outgrow the pool
      case FinishReason::kDeadline:
        return job.config.timeout_ms > 0;
      default:
        return false;
    }
  }

  // Runs the job in a fresh engine with one thread, enough memory, and neither prefix cache nor
  // draft model.
  SoakOutcome RunAlone(const SoakJob& job) {
    RuntimeConfig config = config_;
    config.num_threads = 1;
    config.enable_prefix_cache = false;
    config.token_mask_timeout_ms =
        job.mask_answers == MaskAnswers::kNever ? kMaskTimeoutMs : kLongMaskTimeoutMs;
    Engine engine;
    EXPECT_OK(engine.RegisterImage("m", image_));
    EXPECT_OK(engine.InstallModel(config));
    EXPECT_OK(engine.StartModel("m"));
    const auto lora = loras_.find(job.config.lora_name);
    if (lora != loras_.end()) EXPECT_OK(engine.LoadLora("m", lora->first, lora->second));
    GenerationConfig generation = job.config;
    generation.timeout_ms = 0;
    const Result<StartedRequest> started =
        engine.StartRequest("m", job.prompt, generation, job.MakeMask(&masks_));
    EXPECT_OK(started.status());
    SoakOutcome outcome;
    const auto read = [&outcome](ResultQueue& queue) {
      SoakSequence& sequence = outcome.emplace_back();
      while (auto elements = queue.Get()) sequence.Add(*elements);
      sequence.AddEnd(queue);
    };
    if (!started.ok()) return outcome;
    read(*started->queue);
    for (const StartedRequest& next : started->next_best) read(*next.queue);
    return outcome;
  }

  void ExpectNothingLeft() {
    faults_.End();
    EXPECT_OK(engine_.SyncAllRequests("m", 0));
    // The step thread answers this, so its last step is over. Pinned prefixes are removed too.
    EXPECT_OK((draw_.Chance(0.5) ? engine_.ClearPrefixCache("m") : UnpinAll()).status());
    const EngineStat stat = *engine_.GetEngineStat("m");
    EXPECT_EQ(stat.running_request + stat.pending_request, 0);
    EXPECT_EQ(stat.used_blocks, 0);
    EXPECT_EQ(stat.free_blocks, stat.total_blocks);
    Held now = Measure();
    // A thread that was joined leaves the list of threads a moment later, on a busy machine a long
    // one. At the start one of an earlier engine may have been there.
    for (int i = 0; i < 30'000 && !now.IsWithin(at_start_); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      now = Measure();
    }
    EXPECT_EQ(now.device_bytes, at_start_.device_bytes);
    EXPECT_EQ(now.num_device_allocs, at_start_.num_device_allocs);
    EXPECT_LE(now.num_threads, at_start_.num_threads);
    EXPECT_EQ(now.num_descriptors, at_start_.num_descriptors);
    NoteStat();
  }

  void NoteStat() {
    const EngineStat stat = *engine_.GetEngineStat("m");
    coverage_.Count("preemption", stat.num_preemptions > 0);
    coverage_.Count("prefix hit", stat.prefix_cache_hit_token > 0);
    coverage_.Count("accepted draft", stat.total_accepted_draft_token > 0);
  }

  Result<int64_t> UnpinAll() {
    for (const auto& beginning : beginnings_) {
      while (true) {
        const Result<int64_t> unpinned = engine_.UnpinPrefix("m", beginning);
        if (!unpinned.ok()) return unpinned;
        if (*unpinned == 0) break;
      }
    }
    return 0;
  }

  const uint64_t seed_;
  Draw draw_;
  const std::vector<std::vector<int64_t>> beginnings_;
  // Whether requests end when blocks run out, instead of waiting.
  const bool interrupts_;
  // Whether callers wait for room, instead of being refused.
  const bool blocks_;
  SoakFaults faults_;
  std::shared_ptr<const ModelImage> image_, draft_image_;
  std::map<std::string, std::shared_ptr<const LoraImage>> loras_;
  RuntimeConfig config_;  // without the settings that make the soak hard
  Hook hook_;
  MaskWorker masks_;
  Engine engine_;
  Held at_start_;
  bool injects_ = false;
  int64_t num_rounds_ = 0, heap_noted_ = 0;
  SoakCoverage coverage_;
};

class SoakTest : public ::testing::TestWithParam<std::tuple<proto::ComputeType, CacheMode>> {
 protected:
  // The tests are not about the warm-up, and it would take most of the time of running a request
  // alone.
  const ScopedVariable no_warmup_{"ALLSPARK_DISABLE_WARMUP", "1"};

  static std::unique_ptr<Soak> MakeSoak(uint64_t seed) {
    const auto [compute, cache_mode] = GetParam();
    seed = static_cast<uint64_t>(SoakSetting("ALLSPARK_SOAK_SEED", static_cast<int64_t>(seed)));
    return std::make_unique<Soak>(compute, cache_mode, seed, IsLockstepAlone());
  }
  static bool IsLockstepAlone() { return SoakSetting("ALLSPARK_SOAK_LOCKSTEP", 0) != 0; }
  static bool IsLockstep(int64_t round) { return IsLockstepAlone() || round % 2 == 0; }
};

}  // namespace allspark::testing
