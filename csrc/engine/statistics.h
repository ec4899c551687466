// One model's counters and histograms, from install to release. The step thread writes, any thread
// takes a snapshot; nothing locks or allocates.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "allspark/engine.h"
#include "base/histogram.h"
#include "engine/step_record.h"

namespace allspark {

class Statistics {
 public:
  // For the step thread, except where noted. The counts of a request's end are complete before its
  // readers see the end; only the step's own time is counted later.
  void OnToken() { ++generated_; }
  void OnAcceptedDraft() { ++accepted_; }
  void OnPrefixHit(int64_t num_tokens) { prefix_hits_ += num_tokens; }
  // A request's first step begins; its first token comes; another one does.
  void OnScheduled(int64_t waited_us) { queue_seconds_.Observe(Seconds(waited_us)); }
  void OnFirstToken(int64_t since_arrival_us) { ttft_seconds_.Observe(Seconds(since_arrival_us)); }
  void OnNextToken(int64_t gap_us) { gap_seconds_.Observe(Seconds(gap_us)); }
  // OnComputed: a step is computed; num_preemptions is the total. OnStepEnd: the step is over.
  void OnComputed(const StepRecord& step, int64_t num_preemptions);
  void OnStepEnd(const StepRecord& step);
  void OnEnd(const RequestRecord& request);
  struct Usage {
    int64_t running = 0, used_blocks = 0, cached_blocks = 0;
  };
  void SetUsage(const Usage& usage);
  // A request was denied. Any thread may call.
  void OnDenied() { ++denied_; }

  // Fills in what is counted here; total_blocks and block_size are there already.
  void Report(EngineStat& stat, int64_t now_us) const;

  // Histograms of times in seconds, of sequences and of tokens.
  const Histogram& queue_seconds() const { return queue_seconds_; }
  const Histogram& ttft_seconds() const { return ttft_seconds_; }
  const Histogram& gap_seconds() const { return gap_seconds_; }
  const Histogram& request_seconds() const { return request_seconds_; }
  const Histogram& step_seconds() const { return step_seconds_; }
  const Histogram& batch_size() const { return batch_size_; }
  const Histogram& prompt_tokens() const { return prompt_tokens_; }
  const Histogram& output_tokens() const { return output_tokens_; }

 private:
  static constexpr size_t kNumReasons = static_cast<size_t>(FinishReason::kDeadline) + 1;
  int64_t Ended(FinishReason reason) const { return ended_[static_cast<size_t>(reason)]; }
  static double Seconds(int64_t us) { return static_cast<double>(us) * 1e-6; }

  static constexpr std::array kSeconds{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,  0.25,
                                       0.5,    1.0,   2.5,    5.0,   10.0, 25.0,  50.0, 100.0};
  static constexpr std::array kCounts{1.0,    2.0,    4.0,     8.0,     16.0,    32.0,
                                      64.0,   128.0,  256.0,   512.0,   1024.0,  2048.0,
                                      4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0};
  static_assert(kSeconds.size() <= Histogram::kMaxBounds &&
                kCounts.size() <= Histogram::kMaxBounds);

  std::atomic<int64_t> generated_{0}, prefilled_{0}, steps_{0}, preemptions_{0};
  std::atomic<int64_t> drafted_{0}, accepted_{0}, prefix_hits_{0}, denied_{0};
  std::atomic<int64_t> running_{0}, used_blocks_{0}, cached_blocks_{0};
  std::array<std::atomic<int64_t>, kNumReasons> ended_{};  // by reason
  Histogram queue_seconds_{kSeconds}, ttft_seconds_{kSeconds}, gap_seconds_{kSeconds};
  Histogram request_seconds_{kSeconds}, step_seconds_{kSeconds};
  Histogram batch_size_{kCounts}, prompt_tokens_{kCounts}, output_tokens_{kCounts};
  // Rates are over the last one to two seconds, from the end of one step to that of another. The
  // step thread's:
  static constexpr int64_t kWindowUs = 1000000;
  struct Mark {
    int64_t us = 0, generated = 0, prefilled = 0;
  };
  Mark window_, next_window_, last_step_;
  std::atomic<int64_t> last_step_us_{0};
  std::atomic<double> generated_per_second_{0}, prefilled_per_second_{0};
};

}  // namespace allspark
