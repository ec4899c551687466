// The sizes of all parts of a model, computed from its spec and config when it is installed. Start
// then allocates these sizes.
#pragma once

#include <cstdint>

#include "allspark/config.h"
#include "allspark/engine.h"
#include "engine/draft_model.h"
#include "engine/request.h"
#include "model/decoder.h"
#include "weights/model_reader.h"

namespace allspark {

struct ModelSizes {
  // Checks that the draft model fits the model, that there is memory for the KV pool, and that the
  // pool can hold one request of engine_max_length. `draft`: null without a draft model.
  static Result<ModelSizes> Measure(const RuntimeConfig& config, const ModelReader& reader,
                                    const ModelReader* draft, const Device& device);

  DecoderOptions decoder;
  DraftModelOptions draft;   // where there is a draft model
  RequestLimits limits;      // of a request
  int64_t chunk_tokens = 0;  // most prompt tokens of a step
  int64_t num_blocks = 0;    // of the KV pool
  int64_t num_host_blocks = 0;
  // See SchedulerConfig.
  double draft_row_cost = 0;
  int64_t double_cost_depth = 0;
  ModelInfo info;
};

}  // namespace allspark
