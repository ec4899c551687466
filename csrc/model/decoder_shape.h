// DecoderShape: the sizes and switches of a DecoderSpec as the decoder's parts use them, checked
// once. Plain data.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "allspark/config.h"
#include "allspark/status.h"
#include "base/dtype.h"
#include "ops/device_ops.h"
#include "ops/moe.h"
#include "ops/scale.h"
#include "proto/allspark.pb.h"

namespace allspark {

struct DecoderShape {
  int64_t vocab_size = 0;
  int64_t hidden = 0;
  int64_t num_layers = 0;
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;  // of keys and values in the cache, and of the queries that read them
  // Latent attention (model/latent_attention.h); otherwise these are 0, 0, and head_dim.
  int64_t kv_latent = 0;
  int64_t q_latent = 0;
  int64_t query_dim = 0;     // of a head as the model was trained
  int64_t value_dim = 0;     // of a head's input to the output projection
  int64_t intermediate = 0;  // 0: every layer has experts
  float norm_eps = 0.0f;
  kernels::Activation activation = kernels::Activation::kSilu;
  bool tie_embeddings = false;
  bool qk_norm = false;
  int64_t max_position = 0;  // the length that the model was trained for
  int64_t rotary_dim = 0;
  bool rope_interleaved = false;
  float rope_scaling = 1.0f;  // multiplies cos and sin
  float attention_scale = 1.0f;
  float attention_soft_cap = 0.0f;
  Scaling embedding_scaling;
  Scaling residual_scaling;  // of what attention and MLP add to the stream
  Scaling qkv_scaling;       // of queries, keys and values
  Scaling logits_scaling;
  bool norm_before = true;  // attention and MLP
  bool norm_after = false;
  bool qk_norm_whole = false;
  bool window_rope = false;
  bool layer_norm = false;  // of the stream, instead of RMSNorm
  bool gated_mlp = true;
  bool parallel_residual = false;  // attention and MLP read the same stream
  bool shared_norm = false;        // by one norm
  bool learned_positions = false;  // max_position of them
  RouterParams router;             // num_experts 0: no layer has experts; its bias is each layer's
  int64_t expert_intermediate = 0;
  int64_t shared_intermediate = 0;
  DType compute = DType::kUndefined;  // of GEMM inputs where they are not quantised
  DType cache = DType::kUndefined;    // of keys and values
  bool rotates_keys = false;          // keys and queries are multiplied by a Hadamard matrix
  bool int8_activations = false;      // input of some GEMM
  int64_t reordered_cols = 0;         // of the widest row that is reordered; 0: none

  int64_t q_cols() const { return q_heads * head_dim; }
  int64_t kv_cols() const { return kv_heads * head_dim; }
  // Whether attention and MLP add to the stream by way of Workspace::addend.
  bool has_addend() const { return norm_after || !residual_scaling.is_identity(); }
  // Whether the MLP reads the same normalised rows as attention.
  bool shares_normed() const { return shared_norm && !int8_activations; }
  // The MLP's first weight.
  const char* up_name() const { return gated_mlp ? "gate_up" : "up"; }
  int64_t up_cols() const { return gated_mlp ? 2 * intermediate : intermediate; }
  bool has_experts() const { return router.num_experts > 0; }
  // Of the widest MLP.
  int64_t widest_intermediate() const {
    return std::max({intermediate, expert_intermediate, shared_intermediate});
  }
  int64_t qkv_cols() const { return q_cols() + 2 * kv_cols(); }
  bool has_latents() const { return kv_latent > 0; }
  // Of the rows that queries, keys and values are made from.
  int64_t latent_cols() const { return q_latent + head_dim; }
  int64_t unrotated_dim() const { return query_dim - rotary_dim; }
  // Of the output projection's input.
  int64_t o_cols() const { return q_heads * value_dim; }
  // The widest row that a product of a layer reads.
  int64_t widest_input() const {
    return std::max({hidden, widest_intermediate(), o_cols(), q_latent});
  }
};

// InvalidArgument when the spec is inconsistent, Unimplemented when a head does not fit the cache's
// layout; names the field, the value and the bound.
Result<DecoderShape> MakeDecoderShape(const proto::DecoderSpec& spec, CacheMode cache_mode);

// InvalidArgument if max_length is above the number of learned positions.
Status CheckLearnedPositions(const DecoderShape& shape, int64_t max_length);

// Unimplemented naming op and dtype when `ops` lack one that the decoder of `spec` needs.
Status CheckOps(const DecoderShape& shape, const proto::DecoderSpec& spec, const DeviceOps& ops);

// A sum of so many products of bytes stays below 2^31.
inline constexpr int64_t kMostByteSum = 65536;

// How a spec quantises the weight `tensor`; null: it does not.
const proto::WeightQuant* FindWeightQuant(const proto::DecoderSpec& spec,
                                          const std::string& tensor);
// The input of products with a weight that is quantised so; null: in the compute type.
InputFormat InputFormatOf(const proto::WeightQuant* quant, DType compute);

}  // namespace allspark
