// The log lines about a model's work that the environment asks for: a status line from time to time
// while requests run, a line for each step, one for each request, and its tokens. The step thread
// calls. Nothing is thrown: without memory, a line is left out.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "allspark/engine.h"
#include "engine/step_record.h"

namespace allspark {

class EngineLog {
 public:
  // Reads HIE_LOG_STATUS_INTERVAL, ALLSPARK_TIME_LOG and ALLSPARK_DUMP_OUTPUT_TOKEN.
  explicit EngineLog(std::string model_name);

  // Whether a status line is due. If so, the next one is due an interval later.
  bool IsStatusDue(int64_t now_us);
  void OnStatus(const EngineStat& stat) const;
  void OnStep(const StepRecord& step) const;
  void OnEnd(const RequestRecord& request, std::span<const int32_t> output) const;

 private:
  void DumpTokens(int64_t request_id, std::span<const int32_t> output) const;

  std::string model_name_;
  int64_t status_interval_us_;  // 0: no status
  bool logs_steps_, dumps_tokens_;
  int64_t next_status_us_ = 0;
};

}  // namespace allspark
