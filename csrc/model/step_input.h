// StepInput: what the layers of a step read besides their weights.
#pragma once

#include <cstdint>
#include <vector>

#include "model/lora.h"
#include "ops/linear_each.h"
#include "ops/rope.h"
#include "ops/sequence_range.h"

namespace allspark {

// `layer` and `rope` are set anew for each layer.
struct StepInput {
  SequenceRanges sequences;
  const int32_t* positions = nullptr;   // [tokens]
  RopeView rope;                        // rotary_dim 0: none
  int64_t max_length = 0;               // of a sequence, as in WorkspaceSize
  int64_t logn_length = 0;              // the length that LogN counts from; 0: no LogN
  const float* alibi_slopes = nullptr;  // [q_heads]; null: none
  int64_t layer = 0;
  LoraBatch* lora = nullptr;
  std::vector<LinearTask>* tasks = nullptr;  // room for as many as query heads
};

}  // namespace allspark
