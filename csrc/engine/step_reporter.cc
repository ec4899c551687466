#include "engine/step_reporter.h"

#include <new>

#include "base/clock.h"

namespace allspark {

StepRecord& StepReporter::Begin() {
  step_ = {.begin_us = SteadyNowUs()};
  return step_;
}

void StepReporter::OnPlan(const std::vector<PlannedChunk>& plan) {
  const int64_t now_us = SteadyNowUs();
  // Where the device's memory is the host's, all cached tokens are there.
  const bool has_host_tier = model_.device->has_own_memory();
  step_.num_sequences = static_cast<int64_t>(plan.size());
  for (const PlannedChunk& chunk : plan) {
    step_.num_drafts += chunk.num_drafts;
    if (IsDecode(chunk)) {
      ++step_.num_decodes;
    } else {
      step_.num_prefill_tokens += chunk.num_tokens;
    }
    Request* const request = Request::Of(chunk.sequence);
    const int64_t num_cached = chunk.begin - request->num_computed;
    statistics_.OnPrefixHit(num_cached);
    // Only while a prompt is computed for the first time.
    if (request->num_tokens != request->spec.prompt_length || request->num_preemptions != 0)
      continue;
    if (request->scheduled_us == 0 && request->stands_for_all()) {
      statistics_.OnScheduled(now_us - request->arrival_us());
    }
    request->OnScheduled(now_us, num_cached, has_host_tier ? request->num_restored : num_cached);
  }
}

void StepReporter::OnToken(Request& request, int64_t now_us) {
  statistics_.OnToken();
  if (request.group != nullptr) return;  // its times are counted at the end of the group
  if (request.first_token_us == 0) {
    request.first_token_us = now_us;
    statistics_.OnFirstToken(now_us - request.arrival_us());
  } else {
    statistics_.OnNextToken(now_us - request.last_token_us);
  }
  request.last_token_us = now_us;
}

void StepReporter::OnEnd(const Request& request, FinishReason reason, int64_t now_us) {
  const bool is_ranked = request.group != nullptr && IsOutput(reason);
  const RequestRecord record{.request_id = request.spec.request_id,
                             .arrival_us = request.arrival_us(),
                             .scheduled_us = request.scheduled_us,
                             .first_token_us = request.first_token_us,
                             .end_us = now_us,
                             .prompt_tokens = request.spec.prompt_length,
                             .output_tokens = request.output_length(),
                             .num_preemptions = request.num_preemptions,
                             .reason = is_ranked ? request.group->best_reason() : reason};
  if (is_ranked) statistics_.OnFirstToken(now_us - record.arrival_us);
  statistics_.OnEnd(record);
  if (trace_ != nullptr) trace_->Add(record);
  const std::span<const int32_t> tokens = request.tokens;
  log_.OnEnd(record, request.group == nullptr
                         ? tokens.subspan(static_cast<size_t>(request.spec.prompt_length))
                         : std::span<const int32_t>());
}

void StepReporter::OnUsage(const Scheduler& scheduler) {
  const PrefixCache& cache = scheduler.prefix_cache();
  statistics_.SetUsage({.running = scheduler.num_running(),
                        .used_blocks = cache.pool().num_blocks() - cache.num_available(),
                        .cached_blocks = cache.num_unused()});
}

void StepReporter::End() {
  step_.delivered_us = SteadyNowUs();
  statistics_.OnStepEnd(step_);
  if (trace_ != nullptr) trace_->Add(step_);
  log_.OnStep(step_);
  if (log_.IsStatusDue(step_.delivered_us)) LogStatus();
}

void StepReporter::LogStatus() {
  try {
    log_.OnStatus(stat_());
  } catch (const std::bad_alloc&) {
    // A line of the log is not worth a step.
  }
}

}  // namespace allspark
