// The part of ModelInstance's step that keeps its statistics.

#include <new>

#include "base/clock.h"
#include "engine/model_instance.h"

namespace allspark {

void ModelInstance::CountStep(const std::vector<PlannedChunk>& plan) {
  StepRecord& step = running_->step;
  step.num_sequences = static_cast<int64_t>(plan.size());
  for (const PlannedChunk& chunk : plan) {
    step.num_drafts += chunk.num_drafts;
    if (IsDecode(chunk)) {
      ++step.num_decodes;
    } else {
      step.num_prefill_tokens += chunk.num_tokens;
    }
  }
  statistics_.OnComputed(step, running_->scheduler->num_preemptions());
}

void ModelInstance::EndStep() {
  PublishUsage();
  StepRecord& step = running_->step;
  step.delivered_us = SteadyNowUs();
  statistics_.OnStepEnd(step);
  if (trace_ != nullptr) trace_->Add(step);
  running_->log.OnStep(step);
  if (running_->log.IsStatusDue(step.delivered_us)) LogStatus();
}

void ModelInstance::LogStatus() {
  try {
    running_->log.OnStatus(Stat());
  } catch (const std::bad_alloc&) {
    // A line of the log is not worth a step.
  }
}

void ModelInstance::CountToken(Request& request, int64_t now_us) {
  if (request.group != nullptr) return;  // counted at the end of the group
  if (request.first_token_us == 0) {
    request.first_token_us = now_us;
    statistics_.OnFirstToken(now_us - request.arrival_us());
  } else {
    statistics_.OnNextToken(now_us - request.last_token_us);
  }
  request.last_token_us = now_us;
}

void ModelInstance::CountEnd(const Request& request, FinishReason reason, int64_t now_us) {
  const bool is_ranked = request.group != nullptr && IsOutput(reason);
  const RequestRecord record{.request_id = request.request_id,
                             .arrival_us = request.arrival_us(),
                             .scheduled_us = request.scheduled_us,
                             .first_token_us = request.first_token_us,
                             .end_us = now_us,
                             .prompt_tokens = request.prompt_length,
                             .output_tokens = request.output_length(),
                             .num_preemptions = request.num_preemptions,
                             .reason = is_ranked ? request.group->best_reason() : reason};
  if (is_ranked) statistics_.OnFirstToken(now_us - record.arrival_us);
  statistics_.OnEnd(record);
  if (trace_ != nullptr) trace_->Add(record);
  const std::span<const int32_t> tokens = request.tokens;
  running_->log.OnEnd(record, request.group == nullptr
                                  ? tokens.subspan(static_cast<size_t>(request.prompt_length))
                                  : std::span<const int32_t>());
}

void ModelInstance::PublishUsage() {
  const Scheduler& scheduler = *running_->scheduler;
  const PrefixCache& cache = scheduler.prefix_cache();
  statistics_.SetUsage({.running = scheduler.num_running(),
                        .used_blocks = cache.pool().num_blocks() - cache.num_available(),
                        .cached_blocks = cache.num_unused()});
}

}  // namespace allspark
