// The weights of a decoder as plain structs of views into the mapped model, and the function that
// binds them. Nothing here owns weight data.
#pragma once

#include <cstdint>
#include <vector>

#include "allspark/status.h"
#include "model/decoder_shape.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "weights/model_reader.h"

namespace allspark {

struct NormWeight {
  const float* weight = nullptr;  // [cols]; null: the spec has none
  float eps = 0.0f;
};

struct AttentionWeights {
  NormWeight norm;
  LinearWeight qkv;  // rows: queries, keys, values
  NormWeight q_norm;
  NormWeight k_norm;
  LinearWeight o;
  NormWeight post_norm;
  int64_t window = 0;  // 0: all
};

struct MlpWeights {
  NormWeight norm;
  LinearWeight gate_up;  // rows: gate, up
  LinearWeight down;
  NormWeight post_norm;
  kernels::Activation activation = kernels::Activation::kSilu;
};

struct LayerWeights {
  AttentionWeights attention;
  MlpWeights mlp;
};

struct DecoderWeights {
  EmbeddingWeight embedding;
  std::vector<LayerWeights> layers;
  NormWeight final_norm;
  LinearWeight lm_head;
  const float* rope_inv_freq = nullptr;         // [rotary_dim / 2]; null without rope
  const float* rope_window_inv_freq = nullptr;  // of layers with a window; null: the same
};

// DataLoss naming tensor and file when a tensor that the spec requires is missing or has another
// dtype, shape, layout or size.
Result<DecoderWeights> BindWeights(const ModelReader& reader, const DecoderShape& shape);

}  // namespace allspark
