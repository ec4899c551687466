// Records of one step and of one request: for statistics, the trace and the log.
#pragma once

#include <cstdint>

#include "allspark/result_queue.h"

namespace allspark {

// Times are those of the steady clock in microseconds; 0: has not happened.
struct StepRecord {
  int64_t begin_us = 0;
  int64_t planned_us = 0;    // the drafts, the plan and the batch are known
  int64_t computed_us = 0;   // the forward pass is over
  int64_t written_us = 0;    // outputs besides tokens are written
  int64_t masked_us = 0;     // the wait for token masks is over
  int64_t sampled_us = 0;    // tokens are chosen and in their queues
  int64_t delivered_us = 0;  // their readers are woken
  int64_t num_sequences = 0;
  int64_t num_decodes = 0;
  int64_t num_prefill_tokens = 0;
  int64_t num_drafts = 0;
};

struct RequestRecord {
  uint64_t request_id = 0;
  int64_t arrival_us = 0, scheduled_us = 0, first_token_us = 0, end_us = 0;
  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;  // for a group those of its longest sequence
  int64_t num_preemptions = 0;
  FinishReason reason = FinishReason::kNone;
};

}  // namespace allspark
