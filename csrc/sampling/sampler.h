// Sampler: chooses the next token of each row: edits, mask, then greedy or a draw. A row's result
// depends on its own logits, tokens, parameters, seed and position alone (Philox4x32-10 keyed by
// seed, counter = position), so it is the same under any load and for any number of threads. A
// device makes its own (Device::MakeSampler), because logits are in its memory. What a draw keeps
// is in token_choice.h.
#pragma once

#include <cstdint>

#include "sampling/logit_edits.h"
#include "sampling/logprobs.h"

namespace allspark {

struct SamplingParams {
  bool greedy = true;        // the highest logit, the lowest id among equals
  float temperature = 1.0f;  // below 1e-5: greedy
  int32_t top_k = 0;         // 0: all
  float top_p = 1.0f;        // 1: all
  float min_p = 0.0f;        // 0: all
  uint64_t seed = 0;
};

struct SamplingRow {
  const SamplingParams* params = nullptr;
  float* logits = nullptr;  // [vocab], the device's; may be overwritten
  int64_t position = 0;     // of the token being chosen
  RowEdits edits = {};
  // Bit i % 32 of word i / 32 is off where token i may not be chosen; null: all may.
  const uint32_t* mask = nullptr;
  RowLogprobs* logprobs = nullptr;  // filled; null: not asked for
  // If set, it is filled and no token is chosen; of `logprobs`, only the top is filled. Null: a
  // token is chosen.
  RowCandidates* candidates = nullptr;
  int32_t token = -1;  // result; -1 when no allowed token has a finite logit
};

class Sampler {
 public:
  virtual ~Sampler() = default;
  // Sets each row's token. An edit of a token outside the vocabulary throws InternalError. Nothing
  // allocates. The step thread calls it.
  virtual void Sample(SamplingRow* rows, int64_t num_rows) = 0;
};

}  // namespace allspark
