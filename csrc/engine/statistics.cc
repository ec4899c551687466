#include "engine/statistics.h"

#include <algorithm>

namespace allspark {

void Statistics::OnComputed(const StepRecord& step, int64_t num_preemptions) {
  prefilled_ += step.num_prefill_tokens;
  drafted_ += step.num_drafts;
  preemptions_ = num_preemptions;
  ++steps_;
  batch_size_.Observe(static_cast<double>(step.num_sequences));
}

void Statistics::OnStepEnd(const StepRecord& step) {
  const int64_t now_us = step.delivered_us;
  step_seconds_.Observe(Seconds(now_us - step.begin_us));
  const Mark now = {now_us, generated_, prefilled_};
  if (step.begin_us - last_step_.us > kWindowUs) {
    // After a pause, rates are those since its end.
    window_ = next_window_ = {step.begin_us, last_step_.generated, last_step_.prefilled};
  }
  last_step_ = now;
  last_step_us_ = now_us;
  const double seconds = Seconds(std::max<int64_t>(now_us - window_.us, 1));
  generated_per_second_ = static_cast<double>(now.generated - window_.generated) / seconds;
  prefilled_per_second_ = static_cast<double>(now.prefilled - window_.prefilled) / seconds;
  if (now_us - next_window_.us < kWindowUs) return;
  window_ = next_window_;
  next_window_ = now;
}

void Statistics::OnEnd(const RequestRecord& request) {
  ++ended_[static_cast<size_t>(request.reason)];
  request_seconds_.Observe(Seconds(request.end_us - request.arrival_us));
  prompt_tokens_.Observe(static_cast<double>(request.prompt_tokens));
  output_tokens_.Observe(static_cast<double>(request.output_tokens));
}

void Statistics::SetUsage(const Usage& usage) {
  running_ = usage.running;
  used_blocks_ = usage.used_blocks;
  cached_blocks_ = usage.cached_blocks;
}

void Statistics::Report(EngineStat& stat, int64_t now_us) const {
  stat.used_blocks = used_blocks_;
  stat.cached_blocks = cached_blocks_;
  stat.free_blocks = stat.total_blocks - stat.used_blocks;
  stat.total_token = stat.total_blocks * stat.block_size;
  stat.free_token = stat.free_blocks * stat.block_size;
  stat.token_usage_percentage =
      100.0 * static_cast<double>(stat.used_blocks) / static_cast<double>(stat.total_blocks);
  stat.running_request = running_;
  stat.total_generated_token = generated_;
  stat.total_prefill_token = prefilled_;
  stat.prefix_cache_hit_token = prefix_hits_;
  stat.prefix_cache_miss_token = stat.total_prefill_token;
  if (const int64_t looked_up = stat.prefix_cache_hit_token + stat.prefix_cache_miss_token;
      looked_up > 0) {
    stat.prefix_cache_hit_rate =
        static_cast<double>(stat.prefix_cache_hit_token) / static_cast<double>(looked_up);
    stat.prefix_cache_miss_rate = 1 - stat.prefix_cache_hit_rate;
  }
  // If no step has ended for two seconds, nothing runs, and the rates are too old.
  if (now_us - last_step_us_ < 2 * kWindowUs) {
    stat.generate_token_persec = generated_per_second_;
    stat.process_token_persec = prefilled_per_second_;
  }
  stat.num_preemptions = preemptions_;
  stat.num_steps = steps_;
  stat.total_draft_token = drafted_;
  stat.total_accepted_draft_token = accepted_;
  stat.denied_request = denied_;
  stat.finished_stop = Ended(FinishReason::kStop);
  stat.finished_length = Ended(FinishReason::kLength);
  stat.finished_cancelled = Ended(FinishReason::kCancelled);
  stat.finished_deadline = Ended(FinishReason::kDeadline);
  stat.finished_interrupted = Ended(FinishReason::kInterrupted);
  stat.finished_error = Ended(FinishReason::kError);
}

}  // namespace allspark
