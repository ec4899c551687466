#include "support/random_model.h"

#include <cmath>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include "support/must.h"
#include "weights/format.h"

namespace allspark::testing {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014): one state word, good enough for weights.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // In (-1, 1).
  float Symmetric() {
    return static_cast<float>(static_cast<int64_t>(Next() >> 39) - (1 << 24)) * 0x1p-24f;
  }

 private:
  uint64_t state_;
};

uint64_t HashName(std::string_view name, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325u ^ (seed * 0x9e3779b97f4a7c15u);
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

std::vector<float> InvFreq(int64_t pairs) {
  std::vector<float> values;
  for (int64_t i = 0; i < pairs; ++i) {
    const double exponent = -static_cast<double>(i) / static_cast<double>(pairs);
    values.push_back(static_cast<float>(std::pow(10000.0, exponent)));
  }
  return values;
}

std::vector<float> Slopes(int64_t heads) {
  std::vector<float> values;
  for (int64_t i = 1; i <= heads; ++i) {
    values.push_back(static_cast<float>(
        std::pow(2.0, -8.0 * static_cast<double>(i) / static_cast<double>(heads))));
  }
  return values;
}

// A random permutation of [0, size), as floats.
std::vector<float> RandomOrder(int64_t size, uint64_t seed) {
  std::vector<float> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0.0f);
  Random random(seed);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.Next() % i]);
  return order;
}

proto::DecoderSpec BaseSpec(const char* architecture, proto::ComputeType compute) {
  proto::DecoderSpec spec;
  spec.set_architecture(architecture);
  spec.set_vocab_size(131);
  spec.set_hidden_size(64);
  spec.set_num_layers(2);
  spec.set_num_heads(4);
  spec.set_num_kv_heads(2);
  spec.set_head_dim(16);
  spec.set_intermediate_size(96);
  spec.set_norm_eps(1e-5f);
  spec.set_activation(proto::SILU);
  spec.set_max_position(2048);
  spec.set_rotary_dim(16);
  spec.set_compute_type(compute);
  return spec;
}

void Quantize(proto::DecoderSpec& spec, const char* tensor, int bits, int64_t group_size,
              bool asymmetric, bool activations) {
  proto::WeightQuant* quant = spec.add_weight_quant();
  quant->set_tensor(tensor);
  quant->set_bits(bits);
  quant->set_group_size(group_size);
  quant->set_asymmetric(asymmetric);
  quant->set_quantize_activations(activations);
}

// The numbers of FP4 (E2M1), doubled.
constexpr signed char kFloat4Numbers[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// A weight of version 6 of the file format.
proto::WeightQuant* Form(proto::DecoderSpec& spec, const char* tensor, int bits, int64_t group_size,
                         bool half_scales) {
  Quantize(spec, tensor, bits, group_size, false, false);
  proto::WeightQuant* quant = spec.mutable_weight_quant(spec.weight_quant_size() - 1);
  quant->set_half_scales(half_scales);
  return quant;
}

// Of all weights with int8 activations.
void SetActivationGroups(proto::DecoderSpec& spec, int64_t size) {
  for (proto::WeightQuant& quant : *spec.mutable_weight_quant()) {
    if (quant.quantize_activations()) quant.set_activation_group_size(size);
  }
}

}  // namespace

proto::DecoderSpec TinyLlamaSpec(proto::ComputeType compute) {
  return BaseSpec("LlamaForCausalLM", compute);
}

proto::DecoderSpec TinyQwen2Spec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("Qwen2ForCausalLM", compute);
  spec.set_hidden_size(72);
  spec.set_num_heads(3);
  spec.set_num_kv_heads(1);
  spec.set_head_dim(24);
  spec.set_rotary_dim(24);
  spec.set_intermediate_size(104);
  spec.set_qkv_bias(true);
  spec.set_tie_embeddings(true);
  spec.set_norm_eps(1e-6f);
  return spec;
}

proto::DecoderSpec TinyQwen3Spec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("Qwen3ForCausalLM", compute);
  spec.set_head_dim(32);
  spec.set_rotary_dim(32);
  spec.set_qk_norm(true);
  spec.set_tie_embeddings(true);
  return spec;
}

proto::DecoderSpec TinyMistralSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("MistralForCausalLM", compute);
  spec.set_num_layers(3);
  spec.add_layer_window(17);
  spec.add_layer_window(0);
  spec.add_layer_window(1);
  return spec;
}

proto::DecoderSpec TinyOddSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("OddForCausalLM", compute);
  spec.set_num_heads(6);
  spec.set_num_kv_heads(6);
  spec.set_head_dim(10);
  spec.set_rotary_dim(6);
  spec.set_qk_norm(true);
  spec.set_rope_interleaved(true);
  spec.set_rope_attention_scaling(1.25f);
  spec.set_qkv_bias(true);
  spec.set_o_bias(true);
  spec.set_mlp_bias(true);
  spec.set_attention_scale(0.25f);
  spec.set_attention_soft_cap(2.0f);
  spec.set_activation(proto::GELU_TANH);
  return spec;
}

proto::DecoderSpec TinyQuantizedSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("QuantizedForCausalLM", compute);
  spec.set_tie_embeddings(true);
  spec.set_qkv_bias(true);
  Quantize(spec, "embedding", 8, 0, false, true);
  Quantize(spec, "layers.0.qkv", 8, 0, false, true);
  Quantize(spec, "layers.0.o", 4, 32, true, true);
  Quantize(spec, "layers.0.gate_up", 8, 32, true, true);
  Quantize(spec, "layers.0.down", 4, 0, false, true);
  Quantize(spec, "layers.1.qkv", 4, 64, true, false);
  Quantize(spec, "layers.1.o", 8, 32, false, false);
  Quantize(spec, "layers.1.gate_up", 4, 32, false, true);
  return spec;  // layers.1.down is not quantised
}

proto::DecoderSpec TinyGemmaSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("GemmaForCausalLM", compute);
  spec.set_norm_placement(proto::NORM_AROUND);
  spec.set_tie_embeddings(true);
  spec.set_embedding_scale(8.0f);
  spec.set_logits_soft_cap(3.0f);
  spec.set_qk_norm(true);
  spec.set_window_rope(true);
  spec.add_layer_window(17);
  spec.add_layer_window(0);
  return spec;
}

proto::DecoderSpec TinyOlmoSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("OlmoForCausalLM", compute);
  spec.set_norm_placement(proto::NORM_AFTER);
  spec.set_qk_norm(true);
  spec.set_qk_norm_whole(true);
  spec.set_residual_scale(0.22f);
  spec.set_logits_scale(0.125f);
  return spec;
}

proto::DecoderSpec TinyNeoxSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("NeoxForCausalLM", compute);
  spec.set_num_kv_heads(4);
  spec.set_rotary_dim(4);
  spec.set_norm_kind(proto::LAYER_NORM);
  spec.set_norm_bias(true);
  spec.set_ungated_mlp(true);
  spec.set_parallel_residual(true);
  spec.set_activation(proto::GELU_ERF);
  spec.set_qkv_bias(true);
  spec.set_o_bias(true);
  spec.set_mlp_bias(true);
  spec.set_lm_head_bias(true);
  for (const char* tensor : {"layers.1.up", "layers.1.down"}) {
    Quantize(spec, tensor, 8, 0, false, true);
  }
  return spec;
}

proto::DecoderSpec TinyGpt2Spec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("Gpt2ForCausalLM", compute);
  spec.set_num_kv_heads(4);
  spec.set_intermediate_size(100);
  spec.set_rotary_dim(0);
  spec.set_norm_kind(proto::LAYER_NORM);
  spec.set_norm_bias(true);
  spec.set_ungated_mlp(true);
  spec.set_learned_positions(true);
  spec.set_tie_embeddings(true);
  spec.set_activation(proto::GELU_TANH);
  spec.set_qkv_bias(true);
  spec.set_o_bias(true);
  spec.set_mlp_bias(true);
  return spec;
}

proto::DecoderSpec TinyAlibiSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("AlibiForCausalLM", compute);
  spec.set_num_heads(6);
  spec.set_rotary_dim(0);
  spec.set_alibi(true);
  spec.set_norm_kind(proto::LAYER_NORM);
  spec.set_parallel_residual(true);
  spec.set_shared_norm(true);
  spec.set_embedding_norm(true);
  spec.add_layer_window(0);
  spec.add_layer_window(17);
  return spec;
}

proto::DecoderSpec TinyMixtralSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("MixtralForCausalLM", compute);
  spec.set_intermediate_size(0);
  spec.set_num_experts(8);
  spec.set_experts_per_token(2);
  spec.set_expert_intermediate_size(64);
  spec.set_normalize_expert_weights(true);
  return spec;
}

proto::DecoderSpec TinyDeepseekSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("DeepseekForCausalLM", compute);
  spec.add_dense_layers(0);
  spec.set_num_experts(12);
  spec.set_experts_per_token(3);
  spec.set_expert_intermediate_size(64);
  spec.set_shared_intermediate_size(128);
  spec.set_router_score(proto::ROUTER_SIGMOID);
  spec.set_router_bias(true);
  spec.set_normalize_expert_weights(true);
  spec.set_expert_weight_scale(1.5f);
  spec.set_expert_groups(4);
  spec.set_used_expert_groups(2);
  return spec;
}

proto::DecoderSpec TinyQuantizedMoeSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("QuantizedMoeForCausalLM", compute);
  spec.set_norm_placement(proto::NORM_AROUND);
  spec.set_intermediate_size(0);
  spec.set_num_experts(5);
  spec.set_experts_per_token(2);
  spec.set_expert_intermediate_size(128);
  spec.set_shared_intermediate_size(64);
  spec.set_shared_gate(true);
  Quantize(spec, "layers.0.experts_gate_up", 8, 32, true, true);
  Quantize(spec, "layers.0.experts_down", 4, 0, false, true);
  Quantize(spec, "layers.0.shared_gate_up", 4, 32, false, false);
  Quantize(spec, "layers.1.experts_gate_up", 4, 32, true, false);
  Quantize(spec, "layers.1.experts_down", 8, 0, false, false);
  Quantize(spec, "layers.1.shared_gate_up", 8, 0, false, true);
  Quantize(spec, "layers.1.shared_down", 8, 64, true, true);
  return spec;
}

proto::DecoderSpec TinyLatentSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("LatentForCausalLM", compute);
  spec.set_num_heads(5);
  spec.set_num_kv_heads(1);
  spec.set_head_dim(24);
  spec.set_rotary_dim(8);
  spec.set_rope_interleaved(true);
  spec.set_attention_scale(0.2f);
  spec.set_kv_latent(64);
  spec.set_q_latent(40);
  spec.set_value_dim(64);
  spec.set_latent_norm_eps(1e-2f);
  Quantize(spec, "layers.0.latents", 8, 0, false, true);
  Quantize(spec, "layers.0.o", 8, 64, true, true);
  Quantize(spec, "layers.1.q", 4, 0, false, true);
  return spec;
}

proto::DecoderSpec TinyDbrxSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = TinyMixtralSpec(compute);
  spec.set_architecture("DbrxForCausalLM");
  spec.set_norm_kind(proto::LAYER_NORM);
  spec.set_qkv_limit(0.75f);
  return spec;
}

namespace {

void Reorder(proto::DecoderSpec& spec, const char* tensor, int bits, bool asymmetric,
             bool activations) {
  Quantize(spec, tensor, bits, 32, asymmetric, activations);
  spec.mutable_weight_quant(spec.weight_quant_size() - 1)->set_reordered(true);
}

}  // namespace

proto::DecoderSpec TinyReorderedSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("ReorderedForCausalLM", compute);
  Reorder(spec, "layers.0.qkv", 8, false, true);
  Reorder(spec, "layers.0.o", 4, true, true);
  Reorder(spec, "layers.0.gate_up", 4, false, true);
  Reorder(spec, "layers.0.down", 8, true, true);
  Reorder(spec, "layers.1.qkv", 4, true, false);
  Reorder(spec, "layers.1.o", 8, false, false);
  Reorder(spec, "layers.1.down", 4, false, false);  // of rows that are not quantised
  Reorder(spec, "lm_head", 4, false, true);
  return spec;
}

proto::DecoderSpec TinyReorderedParallelSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = TinyAlibiSpec(compute);
  spec.set_architecture("ReorderedParallelForCausalLM");
  spec.set_ungated_mlp(true);
  spec.set_mlp_bias(true);
  spec.set_num_heads(4);
  Reorder(spec, "layers.0.qkv", 4, false, false);
  Reorder(spec, "layers.0.o", 8, true, false);
  Reorder(spec, "layers.0.up", 8, false, false);
  Reorder(spec, "layers.0.down", 4, true, false);
  Reorder(spec, "layers.1.up", 4, true, false);
  return spec;
}

proto::DecoderSpec TinyReorderedLatentSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = TinyLatentSpec(compute);
  spec.set_architecture("ReorderedLatentForCausalLM");
  spec.set_q_latent(96);
  spec.clear_weight_quant();
  Reorder(spec, "layers.0.latents", 8, false, true);
  Reorder(spec, "layers.0.q", 4, true, false);
  Reorder(spec, "layers.0.o", 4, true, true);
  Reorder(spec, "layers.1.latents", 4, false, false);
  Reorder(spec, "layers.1.q", 8, false, true);
  return spec;
}

proto::DecoderSpec TinyScaledSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = TinyQuantizedSpec(compute);
  spec.set_architecture("ScaledForCausalLM");
  SetActivationGroups(spec, 32);
  return spec;
}

proto::DecoderSpec TinyScaledMoeSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = TinyQuantizedMoeSpec(compute);
  spec.set_architecture("ScaledMoeForCausalLM");
  spec.mutable_weight_quant(3)->set_quantize_activations(true);
  SetActivationGroups(spec, 64);
  // The shared expert reads the same rows as the others, here with other scales.
  spec.mutable_weight_quant(5)->set_activation_group_size(32);
  return spec;
}

proto::DecoderSpec TinyScaledLatentSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = TinyLatentSpec(compute);
  spec.set_architecture("ScaledLatentForCausalLM");
  spec.set_q_latent(96);
  SetActivationGroups(spec, 32);
  return spec;
}

proto::DecoderSpec TinyFormsSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = BaseSpec("FormsForCausalLM", compute);
  spec.set_tie_embeddings(true);
  Form(spec, "embedding", 6, 16, true);
  Form(spec, "layers.0.qkv", 4, 32, true)->set_offset(true);
  Form(spec, "layers.0.o", 4, 32, false)->set_table(kFloat4Numbers, sizeof(kFloat4Numbers));
  Form(spec, "layers.0.gate_up", 8, 0, false)->set_float8(true);
  Form(spec, "layers.0.down", 6, 32, false)->set_offset(true);
  Form(spec, "layers.1.qkv", 6, 16, false);
  Form(spec, "layers.1.o", 8, 64, false)->set_float8(true);
  Form(spec, "layers.1.gate_up", 4, 16, true)->set_offset(true);
  Form(spec, "layers.1.down", 4, 16, false)->set_table(kFloat4Numbers, sizeof(kFloat4Numbers));
  spec.set_intermediate_size(256);  // a block of scale_codes
  for (const int i : {4, 8}) spec.mutable_weight_quant(i)->set_scale_codes(true);
  for (const int i : {2, 6}) spec.mutable_weight_quant(i)->set_power_scales(true);
  for (const int i : {1, 2, 5, 7, 8}) spec.mutable_weight_quant(i)->set_quantize_activations(true);
  for (const int i : {5, 7}) spec.mutable_weight_quant(i)->set_activation_group_size(32);
  return spec;
}

proto::DecoderSpec TinyFormsMoeSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = TinyQuantizedMoeSpec(compute);
  spec.set_architecture("FormsMoeForCausalLM");
  spec.clear_weight_quant();
  Form(spec, "layers.0.experts_gate_up", 4, 32, true)->set_offset(true);
  Form(spec, "layers.0.experts_down", 6, 16, true);
  Form(spec, "layers.1.experts_gate_up", 4, 32, false)
      ->set_table(kFloat4Numbers, sizeof(kFloat4Numbers));
  Form(spec, "layers.1.experts_down", 8, 0, false)->set_float8(true);
  Form(spec, "layers.1.shared_down", 6, 32, true)->set_offset(true);
  spec.mutable_weight_quant(0)->set_quantize_activations(true);
  spec.mutable_weight_quant(1)->set_quantize_activations(true);
  return spec;
}

const std::vector<TinySpecMaker>& TinySpecMakers() {
  static const std::vector<TinySpecMaker> makers = {TinyLlamaSpec,
                                                    TinyQwen2Spec,
                                                    TinyQwen3Spec,
                                                    TinyMistralSpec,
                                                    TinyOddSpec,
                                                    TinyQuantizedSpec,
                                                    TinyGemmaSpec,
                                                    TinyOlmoSpec,
                                                    TinyNeoxSpec,
                                                    TinyGpt2Spec,
                                                    TinyAlibiSpec,
                                                    TinyMixtralSpec,
                                                    TinyDeepseekSpec,
                                                    TinyQuantizedMoeSpec,
                                                    TinyLatentSpec,
                                                    TinyDbrxSpec,
                                                    TinyReorderedSpec,
                                                    TinyReorderedParallelSpec,
                                                    TinyReorderedLatentSpec,
                                                    TinyScaledSpec,
                                                    TinyScaledMoeSpec,
                                                    TinyScaledLatentSpec,
                                                    TinyFormsSpec,
                                                    TinyFormsMoeSpec};
  return makers;
}

std::vector<proto::DecoderSpec> TinySpecs(proto::ComputeType compute) {
  std::vector<proto::DecoderSpec> specs;
  for (const TinySpecMaker make : TinySpecMakers()) specs.push_back(make(compute));
  return specs;
}

const proto::WeightQuant* QuantOf(const proto::DecoderSpec& spec, const std::string& tensor) {
  for (const proto::WeightQuant& quant : spec.weight_quant()) {
    if (quant.tensor() == tensor) return &quant;
  }
  return nullptr;
}

std::vector<float> StoredWeight(const ModelReader& reader, const RequiredTensor& tensor) {
  const proto::WeightQuant* quant = QuantOf(reader.spec(), tensor.name);
  const int64_t n = tensor.shape[0], k = tensor.shape[1];
  const int64_t per_lane = quant->bits() == 8 ? 4 : 8;
  const int64_t group_size = quant->group_size() == 0 ? k : quant->group_size();
  const auto bytes = [&](const std::string& name) {
    return static_cast<const unsigned char*>(Must(reader.Find(name)).data);
  };
  const unsigned char* values = bytes(tensor.name);
  const unsigned char* scales = bytes(tensor.name + "_scale");
  const unsigned char* offsets = quant->offset() ? bytes(tensor.name + "_offset") : nullptr;
  const unsigned char* zeros = quant->asymmetric() ? bytes(tensor.name + "_zero") : nullptr;
  const unsigned char* high = quant->bits() == 6 ? bytes(tensor.name + "_high") : nullptr;
  const auto word = [](const unsigned char* from, int64_t i) {
    return reinterpret_cast<const uint16_t*>(from)[i];
  };
  // Of a scale or an offset; `block`: the name's end of their blocks.
  const auto as_float = [&](const unsigned char* from, int64_t row, int64_t col,
                            const char* block) {
    const int64_t group = (row / 64 * (k / group_size) + col / group_size) * 64 + row % 64;
    if (quant->power_scales()) return std::ldexp(1.0f, from[group] - 127);
    if (quant->scale_codes()) {
      const int64_t at = (row / 64 * (k / 256) + col / 256) * 64 + row % 64;
      return static_cast<float>(from[group] - 128) *
             ToFloat(Float16{word(bytes(tensor.name + block), at)});
    }
    const uint16_t stored = word(from, group);
    return quant->half_scales() ? ToFloat(Float16{stored}) : ToFloat(BFloat16{stored});
  };
  std::vector<float> weight;
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t col = 0; col < k; ++col) {
      const int64_t lane = (row / 64 * (k / per_lane) + col / per_lane) * 64 + row % 64;
      const int64_t at = col % per_lane;
      const int byte = values[lane * 4 + at % 4];
      int u = quant->bits() == 8 ? byte : at < 4 ? byte & 15 : byte >> 4;
      if (high != nullptr) {
        const int64_t high_lane = (row / 64 * (k / 16) + col / 16) * 64 + row % 64;
        u += (high[high_lane * 4 + col % 4] >> col % 16 / 4 * 2 & 3) * 16;
      }
      const int64_t group = (row / 64 * (k / group_size) + col / group_size) * 64 + row % 64;
      const int zero = offsets != nullptr ? 0
                       : zeros != nullptr ? zeros[group]
                                          : 1 << (quant->bits() - 1);
      const float number = quant->float8() ? ToFloat(Float8E4M3{static_cast<uint8_t>(u)})
                           : !quant->table().empty()
                               ? static_cast<float>(static_cast<int8_t>(quant->table()[u]))
                               : static_cast<float>(u - zero);
      weight.push_back(number * as_float(scales, row, col, "_block_scale") +
                       (offsets == nullptr ? 0.0f : as_float(offsets, row, col, "_block_offset")));
    }
  }
  return weight;
}

std::vector<float> RandomTensor(const RequiredTensor& tensor, uint64_t seed) {
  int64_t size = 1;
  for (const int64_t dim : tensor.shape) size *= dim;
  if (tensor.name == "rope.inv_freq") return InvFreq(size);
  if (tensor.name == "alibi.slopes") return Slopes(size);
  if (tensor.name.ends_with("_order")) return RandomOrder(size, HashName(tensor.name, seed));
  // Norm weights are around 1. Matrices keep the variance of their results a little above 1, so
  // that attention is neither flat nor concentrated on a single key.
  const bool is_norm = tensor.name.ends_with("norm");
  float scale = 0.2f;
  if (tensor.name.ends_with("embedding")) {
    scale = 0.5f;
  } else if (tensor.shape.size() == 2) {
    scale = 2.0f / std::sqrt(static_cast<float>(tensor.shape[1]));
  }
  Random random(HashName(tensor.name, seed));
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) {
    value = (is_norm ? 1.0f : 0.0f) + scale * random.Symmetric();
    if (tensor.dtype == DType::kBFloat16) value = ToFloat(ToBFloat16(value));
    if (tensor.dtype == DType::kFloat16) value = ToFloat(ToFloat16(value));
  }
  return values;
}

namespace {

// Whether a layer from silent_from on adds to the residual stream by this tensor.
bool IsSilent(const std::string& name, int64_t silent_from) {
  const std::string prefix = "layers.";
  if (!name.starts_with(prefix) || !(name.ends_with(".o") || name.ends_with("down"))) return false;
  return std::stoll(name.substr(prefix.size())) >= silent_from;
}

// Adds a whole tensor.
template <class T>
void Add(ModelWriter& writer, const std::string& name, DType dtype, const std::vector<T>& values,
         const std::vector<int64_t>& shape) {
  TensorView view;
  view.data = values.data();
  view.dtype = dtype;
  view.rank = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (int32_t i = view.rank - 1; i >= 0; --i) {
    view.dims[i] = shape[static_cast<size_t>(i)];
    view.strides[i] = stride;
    stride *= view.dims[i];
  }
  Must(writer.AddTensor(name, 0, view));
}

// Integers that spread over their range as `values` do, with scales of about their size.
void AddForm(ModelWriter& writer, const RequiredTensor& tensor, const proto::WeightQuant& quant,
             const std::vector<float>& values) {
  const int64_t n = tensor.shape[0], k = tensor.shape[1];
  const int64_t groups = quant.group_size() == 0 ? 1 : k / quant.group_size();
  float largest = 1e-3f;
  for (const float value : values) largest = std::max(largest, std::fabs(value));
  const auto top = static_cast<float>((1 << quant.bits()) - 1);
  std::vector<uint8_t> low, high;
  for (const float value : values) {
    auto u = static_cast<uint8_t>(std::lround((value / largest + 1.0f) * 0.5f * top));
    if (quant.float8()) u &= 0xbf;  // below 2
    low.push_back(quant.bits() == 6 ? u & 15 : u);
    high.push_back(u >> 4);
  }
  const float step = quant.float8()           ? largest / 2
                     : !quant.table().empty() ? largest / 12
                                              : 2 * largest / top;
  Add(writer, tensor.name, DType::kUInt8, low, tensor.shape);
  if (quant.bits() == 6) Add(writer, tensor.name + "_high", DType::kUInt8, high, tensor.shape);
  std::vector<float> scales, offsets;
  std::vector<uint8_t> exponents, codes, negative;
  for (int64_t i = 0; i < n * groups; ++i) {
    const auto part = static_cast<float>(6 + i % 5);
    scales.push_back(step * part / 8);
    offsets.push_back(-0.5f * top * scales.back());
    exponents.push_back(static_cast<uint8_t>(127 + std::ilogb(step) - i % 2));
    codes.push_back(static_cast<uint8_t>(128 + 10 * part));
    negative.push_back(static_cast<uint8_t>(128 - 10 * part));
  }
  const std::vector<int64_t> shape = {n, groups}, blocks = {n, k / 256};
  const auto block = [&](float value) {
    return std::vector<float>(static_cast<size_t>(n * (k / 256)), value / 80);
  };
  if (quant.power_scales()) {
    Add(writer, tensor.name + "_scale", DType::kUInt8, exponents, shape);
  } else if (quant.scale_codes()) {
    Add(writer, tensor.name + "_scale", DType::kUInt8, codes, shape);
    Add(writer, tensor.name + "_block_scale", DType::kFloat32, block(step), blocks);
    if (!quant.offset()) return;
    Add(writer, tensor.name + "_offset", DType::kUInt8, negative, shape);
    Add(writer, tensor.name + "_block_offset", DType::kFloat32, block(0.5f * top * step), blocks);
  } else {
    Add(writer, tensor.name + "_scale", DType::kFloat32, scales, shape);
    if (quant.offset()) Add(writer, tensor.name + "_offset", DType::kFloat32, offsets, shape);
  }
}

}  // namespace

std::shared_ptr<const ModelImage> MakeRandomModel(const proto::DecoderSpec& spec, uint64_t seed,
                                                  int64_t silent_from) {
  const auto writer = Must(ModelWriter::Create(spec, proto::BuildRecord(), "", "", nullptr));
  for (const RequiredTensor& tensor : Must(RequiredTensors(spec))) {
    // Written together with its weight.
    if (tensor.layout == proto::PANEL64_SCALE || tensor.dtype == DType::kUInt2) continue;
    std::vector<float> values = RandomTensor(tensor, seed);
    if (IsSilent(tensor.name, silent_from)) std::fill(values.begin(), values.end(), 0.0f);
    const proto::WeightQuant* quant = QuantOf(spec, tensor.name);
    if (quant != nullptr && weights::IsMadeElsewhere(*quant)) {
      AddForm(*writer, tensor, *quant, values);
    } else if (tensor.dtype == DType::kInt32) {
      const std::vector<int32_t> integers(values.begin(), values.end());
      Add(*writer, tensor.name, DType::kInt32, integers, tensor.shape);
    } else {
      Add(*writer, tensor.name, DType::kFloat32, values, tensor.shape);
    }
  }
  return Must(writer->Finish());
}

std::unique_ptr<ModelReader> OpenRandomModel(const proto::DecoderSpec& spec, uint64_t seed) {
  return Must(ModelReader::OpenImage(MakeRandomModel(spec, seed), nullptr));
}

}  // namespace allspark::testing
