// The weights of a decoder as plain structs of views, and the function that binds them to where the
// model's tensors lie for a device. Nothing here owns weight data.
#pragma once

#include <cstdint>
#include <vector>

#include "allspark/status.h"
#include "model/decoder_shape.h"
#include "model/placed_weights.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/norm.h"
#include "weights/model_reader.h"

namespace allspark {

// What latent attention has instead of qkv.
struct LatentWeights {
  LinearWeight latents;  // rows: latent of queries, latent of keys and values, rotated key
  NormWeight q_norm;     // of the queries' latent; no weight where there is none
  NormWeight kv_norm;
  LinearWeight q;
  LinearWeight k_up;  // head after head; turns a head's query into one over the latent
  LinearWeight v_up;  // head after head
};

struct AttentionWeights {
  NormWeight norm;
  LinearWeight qkv;  // rows: queries, keys, values
  NormWeight q_norm;
  NormWeight k_norm;
  LatentWeights latent;
  LinearWeight o;
  NormWeight post_norm;
  int64_t window = 0;  // 0: all
};

struct MlpWeights {
  LinearWeight gate_up;  // rows: gate, up; up alone where the spec has no gate
  // If its columns have another order, so have the rows of gate and up: down.order is null.
  LinearWeight down;
};

// A mixture of experts in the place of an MLP.
struct MoeWeights {
  LinearWeight router;  // rows: experts, the shared expert's gate; data null: the layer has an MLP
  const float* router_bias = nullptr;  // null: the spec has none
  LinearWeight gate_up;                // expert after expert, rows: gate, up
  LinearWeight down;                   // expert after expert
  LinearWeight shared_gate_up;         // data null: there is none
  LinearWeight shared_down;
};

struct LayerWeights {
  AttentionWeights attention;
  NormWeight mlp_norm;
  MlpWeights mlp;  // one of these two; the other has no data
  MoeWeights moe;
  NormWeight mlp_post_norm;
};

struct DecoderWeights {
  EmbeddingWeight embedding;
  EmbeddingWeight position_embedding;  // no data without learned positions
  NormWeight embedding_norm;
  std::vector<LayerWeights> layers;
  NormWeight final_norm;
  LinearWeight lm_head;
  // In host memory: [rotary_dim / 2]; null without rope.
  const float* rope_inv_freq = nullptr;
  const float* rope_window_inv_freq = nullptr;  // of layers with a window; null: the same
  const float* alibi_slopes = nullptr;          // [q_heads]; null without ALiBi
};

// DataLoss naming tensor and file when an order of columns is no permutation; ResourceExhausted
// where `placed` has no room. What is bound lies as long as the reader and `placed` do.
Result<DecoderWeights> BindWeights(const ModelReader& reader, const DecoderShape& shape,
                                   PlacedWeights& placed);

}  // namespace allspark
