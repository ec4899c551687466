// Tells statistics, trace and log what a step did. The step thread's.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/engine_log.h"
#include "engine/installed_model.h"
#include "engine/request.h"
#include "engine/statistics.h"
#include "engine/step_record.h"
#include "engine/step_trace.h"
#include "scheduler/scheduler.h"

namespace allspark {

class StepReporter {
 public:
  // `trace`: null if none is kept. `stat`: for the log's status line.
  StepReporter(const InstalledModel& model, Statistics& statistics, StepTrace* trace,
               std::function<EngineStat()> stat)
      : model_(model),
        statistics_(statistics),
        trace_(trace),
        stat_(std::move(stat)),
        log_(model.config.model_name) {}

  // A step begins; its times are noted in the record that this returns.
  StepRecord& Begin();
  const StepRecord& step() const { return step_; }
  // The plan will be computed; counts it in step().
  void OnPlan(const std::vector<PlannedChunk>& plan);
  // It was computed; num_preemptions is the total.
  void OnComputed(int64_t num_preemptions) { statistics_.OnComputed(step_, num_preemptions); }
  void OnToken(Request& request, int64_t now_us);
  void OnCandidates() { statistics_.OnToken(); }  // of a beam
  void OnAcceptedDraft() { statistics_.OnAcceptedDraft(); }
  void OnEnd(const Request& request, FinishReason reason, int64_t now_us);
  // What runs or is cached has changed.
  void OnUsage(const Scheduler& scheduler);
  // The step is over and its tokens are delivered.
  void End();

 private:
  void LogStatus();

  const InstalledModel& model_;
  Statistics& statistics_;
  StepTrace* const trace_;
  const std::function<EngineStat()> stat_;
  EngineLog log_;
  StepRecord step_;
};

}  // namespace allspark
