// A hook for tests, to watch a step or make it fail: it gets the step's events on the step thread
// and may throw.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "engine/logits_buffer.h"

namespace allspark {

enum class StepPhase : int {
  kLoopBegin,  // the step thread has started
  kBegin,      // a step was planned and is about to be computed
  kLogits,     // one row of logits, before sampling
  kEnd,        // the step is done; its tokens are in the queues
};

struct StepEvent {
  StepPhase phase;
  int64_t num_decodes = 0, num_prefill_tokens = 0;  // kBegin
  uint64_t request_id = 0;                          // kLogits
  int64_t position = 0;                             // kLogits: of the token to be sampled
  const float* row = nullptr;                       // kLogits: on the device
  LogitsBuffer* logits = nullptr;

  // kLogits: the row, [vocab_size], until the next call. It is read only where it is asked for,
  // because a device may have to copy it.
  std::span<const float> ReadLogits() const {
    return {logits->Read(row, 1), static_cast<size_t>(logits->vocab_size())};
  }
};

using StepHook = std::function<void(const StepEvent&)>;

}  // namespace allspark
