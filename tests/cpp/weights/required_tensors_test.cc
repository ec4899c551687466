#include <cmath>
#include <functional>
#include <limits>
#include <map>

#include "cpp/weights/weights_test_util.h"
#include "support/random_model.h"

namespace allspark::testing {
namespace {

const RequiredTensor* FindIn(const std::vector<RequiredTensor>& list, const std::string& name) {
  for (const RequiredTensor& tensor : list) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

void ExpectTensor(const std::vector<RequiredTensor>& list, const std::string& name, DType dtype,
                  proto::Layout layout, const std::vector<int64_t>& shape) {
  const RequiredTensor* tensor = FindIn(list, name);
  ASSERT_NE(tensor, nullptr) << name;
  EXPECT_EQ(tensor->dtype, dtype) << name;
  EXPECT_EQ(tensor->layout, layout) << name;
  EXPECT_EQ(tensor->shape, shape) << name;
}

TEST(RequiredTensors, ListsEveryTensorOfAFullSpec) {
  const auto list = Required(OddSpec(proto::COMPUTE_BFLOAT16));
  const DType w = DType::kBFloat16;
  const DType f = DType::kFloat32;
  const proto::Layout row = proto::ROW_MAJOR;
  const proto::Layout panel = proto::PANEL64;
  ExpectTensor(list, "embedding", w, row, {37, 18});
  ExpectTensor(list, "lm_head", w, panel, {37, 18});
  ExpectTensor(list, "final_norm", f, row, {18});
  ExpectTensor(list, "rope.inv_freq", f, row, {3});
  for (const std::string layer : {"layers.0.", "layers.1."}) {
    ExpectTensor(list, layer + "attention_norm", f, row, {18});
    ExpectTensor(list, layer + "qkv", w, panel, {110, 18});
    ExpectTensor(list, layer + "qkv_bias", f, row, {110});
    ExpectTensor(list, layer + "q_norm", f, row, {10});
    ExpectTensor(list, layer + "k_norm", f, row, {10});
    ExpectTensor(list, layer + "o", w, panel, {18, 90});
    ExpectTensor(list, layer + "o_bias", f, row, {18});
    ExpectTensor(list, layer + "mlp_norm", f, row, {18});
    ExpectTensor(list, layer + "gate_up", w, panel, {140, 18});
    ExpectTensor(list, layer + "gate_up_bias", f, row, {140});
    ExpectTensor(list, layer + "down", w, panel, {18, 70});
    ExpectTensor(list, layer + "down_bias", f, row, {18});
  }
  EXPECT_EQ(list.size(), 4u + 2u * 12u);
}

TEST(RequiredTensors, NormsAndFrequenciesOfOtherDecoders) {
  proto::DecoderSpec spec = OddSpec(proto::COMPUTE_BFLOAT16);
  const size_t plain = Required(spec).size();
  spec.set_norm_placement(proto::NORM_AROUND);
  spec.set_qk_norm_whole(true);
  spec.set_window_rope(true);
  auto list = Required(spec);
  EXPECT_EQ(list.size(), plain + 2 * 2 + 1);
  ExpectTensor(list, "layers.1.attention_post_norm", DType::kFloat32, proto::ROW_MAJOR, {18});
  ExpectTensor(list, "layers.1.mlp_post_norm", DType::kFloat32, proto::ROW_MAJOR, {18});
  ExpectTensor(list, "layers.0.q_norm", DType::kFloat32, proto::ROW_MAJOR, {90});
  ExpectTensor(list, "layers.0.k_norm", DType::kFloat32, proto::ROW_MAJOR, {10});
  ExpectTensor(list, "rope.window_inv_freq", DType::kFloat32, proto::ROW_MAJOR, {3});
  spec.set_norm_placement(proto::NORM_AFTER);
  list = Required(spec);
  EXPECT_EQ(list.size(), plain + 1);
  EXPECT_EQ(FindIn(list, "layers.0.attention_norm"), nullptr);
}

TEST(RequiredTensors, LayerNormsAndOlderShapes) {
  proto::DecoderSpec spec = OddSpec(proto::COMPUTE_BFLOAT16);
  const size_t plain = Required(spec).size();
  const DType w = DType::kBFloat16, f = DType::kFloat32;
  const proto::Layout row = proto::ROW_MAJOR;
  spec.set_norm_kind(proto::LAYER_NORM);
  spec.set_ungated_mlp(true);
  auto list = Required(spec);
  EXPECT_EQ(list.size(), plain);
  ExpectTensor(list, "layers.1.up", w, proto::PANEL64, {70, 18});
  ExpectTensor(list, "layers.1.up_bias", f, row, {70});
  EXPECT_EQ(FindIn(list, "layers.1.gate_up"), nullptr);
  spec.set_norm_bias(true);
  spec.set_learned_positions(true);
  spec.set_lm_head_bias(true);
  spec.set_embedding_norm(true);
  spec.set_alibi(true);
  list = Required(spec);
  EXPECT_EQ(list.size(), plain + 2 * 2 + 1 + 1 + 1 + 2 + 1);
  for (const char* name : {"layers.0.attention_norm_bias", "layers.1.mlp_norm_bias",
                           "final_norm_bias", "embedding_norm", "embedding_norm_bias"}) {
    ExpectTensor(list, name, f, row, {18});
  }
  ExpectTensor(list, "position_embedding", w, row, {spec.max_position(), 18});
  ExpectTensor(list, "lm_head_bias", f, row, {37});
  ExpectTensor(list, "alibi.slopes", f, row, {9});
  spec.set_parallel_residual(true);
  EXPECT_EQ(Required(spec).size(), list.size());
  spec.set_shared_norm(true);
  EXPECT_EQ(Required(spec).size(), list.size() - 2 * 2);
  for (auto set :
       {&proto::DecoderSpec::set_ungated_mlp, &proto::DecoderSpec::set_parallel_residual,
        &proto::DecoderSpec::set_learned_positions, &proto::DecoderSpec::set_lm_head_bias,
        &proto::DecoderSpec::set_embedding_norm, &proto::DecoderSpec::set_alibi}) {
    proto::DecoderSpec one = OddSpec(proto::COMPUTE_BFLOAT16);
    EXPECT_EQ(weights::FormatVersionOf(one), 1u);
    (one.*set)(true);
    EXPECT_EQ(weights::FormatVersionOf(one), 3u);
    EXPECT_EQ(weights::OldestVersionOf(one), 3u);
  }
}

TEST(RequiredTensors, LeavesOptionalTensorsOut) {
  const auto list = Required(SmallSpec());
  EXPECT_EQ(list.size(), 8u);
  ExpectTensor(list, "embedding", DType::kFloat32, proto::PANEL64, {5, 4});
  for (const char* name : {"lm_head", "rope.inv_freq", "layers.0.qkv_bias", "layers.0.q_norm",
                           "layers.0.o_bias", "layers.0.gate_up_bias", "layers.1.qkv"}) {
    EXPECT_EQ(FindIn(list, name), nullptr) << name;
  }
}

struct BadSpec {
  std::function<void(proto::DecoderSpec&)> change;
  std::vector<std::string> message;
};

TEST(RequiredTensors, RefusesInconsistentSpecsByFieldValueAndBound) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  using S = proto::DecoderSpec;
  const std::vector<BadSpec> bad = {
      {[](S& s) { s.set_vocab_size(0); }, {"vocab_size is 0", "[1, 16777216]"}},
      {[](S& s) { s.set_vocab_size(-1); }, {"vocab_size is -1"}},
      {[](S& s) { s.set_vocab_size(INT64_MAX); }, {"vocab_size is 9223372036854775807"}},
      {[](S& s) { s.set_hidden_size(0); }, {"hidden_size is 0"}},
      {[](S& s) { s.set_hidden_size(INT64_MIN); }, {"hidden_size"}},
      {[](S& s) { s.set_num_layers(0); }, {"num_layers is 0"}},
      {[](S& s) { s.set_num_layers(4097); }, {"num_layers is 4097", "[1, 4096]"}},
      {[](S& s) { s.set_num_heads(0); }, {"num_heads is 0"}},
      {[](S& s) { s.set_num_kv_heads(0); }, {"num_kv_heads is 0"}},
      {[](S& s) { s.set_num_kv_heads(2); }, {"num_heads is 9", "num_kv_heads, 2"}},
      {[](S& s) { s.set_head_dim(0); }, {"head_dim is 0"}},
      {[](S& s) { s.set_head_dim(1 << 20); }, {"head_dim is 1048576"}},
      {[](S& s) { s.set_num_heads(65536), s.set_head_dim(8192); },
       {"num_heads * head_dim is 536870912"}},
      {[](S& s) { s.set_intermediate_size(-70); }, {"intermediate_size is -70"}},
      {[](S& s) { s.set_max_position(0); }, {"max_position is 0"}},
      {[](S& s) { s.set_rotary_dim(3); }, {"rotary_dim is 3", "even"}},
      {[](S& s) { s.set_rotary_dim(12); }, {"rotary_dim is 12", "[0, 10]"}},
      {[](S& s) { s.set_rotary_dim(-2); }, {"rotary_dim is -2"}},
      {[](S& s) { s.add_layer_window(1); }, {"layer_window has 3 values", "num_layers, 2"}},
      {[](S& s) { s.set_layer_window(1, -1); }, {"layer_window[1] is -1"}},
      {[=](S& s) { s.set_norm_eps(nan); }, {"norm_eps is nan"}},
      {[](S& s) { s.set_norm_eps(-1e-5f); }, {"norm_eps"}},
      {[=](S& s) { s.set_attention_scale(inf); }, {"attention_scale is inf"}},
      {[=](S& s) { s.set_attention_soft_cap(-inf); }, {"attention_soft_cap"}},
      {[=](S& s) { s.set_rope_attention_scaling(nan); }, {"rope_attention_scaling"}},
      {[](S& s) { s.set_embedding_scale(-1.0f); }, {"embedding_scale is -1", "not negative"}},
      {[=](S& s) { s.set_residual_scale(nan); }, {"residual_scale is nan"}},
      {[=](S& s) { s.set_logits_scale(inf); }, {"logits_scale is inf"}},
      {[](S& s) { s.set_logits_soft_cap(-30.0f); }, {"logits_soft_cap is -30"}},
      {[](S& s) { s.set_norm_placement(static_cast<proto::NormPlacement>(3)); },
       {"norm_placement is 3", "0 to 2"}},
      {[](S& s) { s.set_qk_norm(false), s.set_qk_norm_whole(true); }, {"qk_norm_whole is true"}},
      {[](S& s) { s.clear_layer_window(), s.set_window_rope(true); }, {"window_rope is true"}},
      {[](S& s) { s.set_norm_kind(static_cast<proto::NormKind>(2)); },
       {"norm_kind is 2", "0 to 1"}},
      {[](S& s) { s.set_norm_bias(true); }, {"norm_bias is true", "LAYER_NORM"}},
      {[](S& s) { s.set_shared_norm(true); }, {"shared_norm is true", "parallel_residual"}},
      {[](S& s) { s.set_parallel_residual(true), s.set_norm_placement(proto::NORM_AFTER); },
       {"parallel_residual is true", "NORM_BEFORE"}},
      {[](S& s) {
         s.set_learned_positions(true);
         s.add_weight_quant()->set_tensor("position_embedding");
         s.mutable_weight_quant(0)->set_bits(8);
       },
       {"\"position_embedding\"", "neither the weight"}},
      {[](S& s) { s.set_activation(static_cast<proto::Activation>(9)); }, {"activation is 9"}},
      {[](S& s) { s.set_compute_type(proto::COMPUTE_UNSPECIFIED); }, {"compute_type is 0"}},
      {[](S& s) { s.set_compute_type(static_cast<proto::ComputeType>(7)); }, {"compute_type is 7"}},
      {[](S& s) { s.set_hidden_size(17); }, {"hidden_size is 17", "multiple of 2"}},
      {[](S& s) { s.set_intermediate_size(7); }, {"intermediate_size is 7", "multiple of 2"}},
      {[](S& s) { s.set_head_dim(9), s.set_rotary_dim(0); }, {"num_heads * head_dim is 81"}},
  };
  for (const BadSpec& item : bad) {
    proto::DecoderSpec spec = OddSpec(proto::COMPUTE_BFLOAT16);
    item.change(spec);
    const auto list = RequiredTensors(spec);
    ASSERT_FALSE(list.ok()) << item.message[0];
    ExpectError(list.status(), StatusCode::kInvalidArgument, item.message);
  }
}

// Two layers, the first of them dense.
proto::DecoderSpec ExpertSpec() {
  proto::DecoderSpec spec = OddSpec(proto::COMPUTE_BFLOAT16);
  spec.set_mlp_bias(false);
  spec.set_hidden_size(128);
  spec.set_num_experts(6);
  spec.set_experts_per_token(2);
  spec.set_expert_intermediate_size(64);
  spec.add_dense_layers(0);
  return spec;
}

TEST(RequiredTensors, Experts) {
  proto::DecoderSpec spec = ExpertSpec();
  auto list = Required(spec);
  const auto bf16 = DType::kBFloat16;
  ExpectTensor(list, "layers.0.gate_up", bf16, proto::PANEL64, {140, 128});
  ExpectTensor(list, "layers.1.router", bf16, proto::PANEL64, {6, 128});
  ExpectTensor(list, "layers.1.experts_gate_up", bf16, proto::PANEL64, {6 * 128, 128});
  ExpectTensor(list, "layers.1.experts_down", bf16, proto::PANEL64, {6 * 128, 64});
  for (const char* name : {"layers.0.router", "layers.1.gate_up", "layers.1.down",
                           "layers.1.router_bias", "layers.1.shared_gate_up"}) {
    EXPECT_EQ(FindIn(list, name), nullptr) << name;
  }
  const size_t plain = list.size();
  spec.set_shared_intermediate_size(192);
  spec.set_shared_gate(true);
  spec.set_router_bias(true);
  spec.clear_dense_layers();
  spec.set_intermediate_size(0);
  list = Required(spec);
  EXPECT_EQ(list.size(), plain - 2 + 3 + 2 * 3);
  ExpectTensor(list, "layers.0.router", bf16, proto::PANEL64, {7, 128});
  ExpectTensor(list, "layers.0.router_bias", DType::kFloat32, proto::ROW_MAJOR, {6});
  ExpectTensor(list, "layers.0.shared_gate_up", bf16, proto::PANEL64, {2 * 192, 128});
  ExpectTensor(list, "layers.0.shared_down", bf16, proto::PANEL64, {128, 192});
}

proto::WeightQuant* Quantise(proto::DecoderSpec& spec, const char* tensor, int64_t group_size) {
  proto::WeightQuant* quant = spec.add_weight_quant();
  quant->set_tensor(tensor);
  quant->set_bits(8);
  quant->set_group_size(group_size);
  return quant;
}

TEST(RequiredTensors, OrdersOfColumns) {
  proto::DecoderSpec spec = ExpertSpec();
  Quantise(spec, "layers.0.qkv", 32)->set_reordered(true);
  Quantise(spec, "layers.1.qkv", 32);
  Quantise(spec, "lm_head", 64)->set_reordered(true);
  const auto list = Required(spec);
  ExpectTensor(list, "layers.0.qkv_order", DType::kInt32, proto::ROW_MAJOR, {128});
  ExpectTensor(list, "lm_head_order", DType::kInt32, proto::ROW_MAJOR, {128});
  EXPECT_EQ(FindIn(list, "layers.1.qkv_order"), nullptr);
  EXPECT_EQ(weights::FormatVersionOf(spec), 4u);
  spec.mutable_weight_quant(0)->set_reordered(false);
  spec.mutable_weight_quant(2)->set_reordered(false);
  EXPECT_EQ(weights::FormatVersionOf(spec), 3u);

  const auto refusal = [](const char* tensor, int64_t group_size) {
    proto::DecoderSpec bad = ExpertSpec();
    bad.set_shared_intermediate_size(64);
    Quantise(bad, tensor, group_size)->set_reordered(true);
    return RequiredTensors(bad).status();
  };
  ExpectError(refusal("layers.0.qkv", 0), StatusCode::kInvalidArgument,
              {"layers.0.qkv", "reordered is true", "without a group_size"});
  for (const char* name : {"embedding", "layers.1.experts_gate_up", "layers.1.experts_down",
                           "layers.1.shared_gate_up", "layers.1.shared_down"}) {
    ExpectError(refusal(name, 32), StatusCode::kInvalidArgument,
                {name, "reordered is true", "of embeddings and of experts"});
  }
}

// Latent attention, with latents of queries too.
proto::DecoderSpec LatentSpec() {
  proto::DecoderSpec spec = testing::TinyLatentSpec(proto::COMPUTE_BFLOAT16);
  spec.clear_weight_quant();
  return spec;
}

TEST(RequiredTensors, Latents) {
  proto::DecoderSpec spec = LatentSpec();  // 5 heads of 16 + 8, latents of 40 and 64, values of 64
  auto list = Required(spec);
  const auto bf16 = DType::kBFloat16;
  ExpectTensor(list, "layers.0.latents", bf16, proto::PANEL64, {40 + 64 + 8, 64});
  ExpectTensor(list, "layers.1.q_latent_norm", DType::kFloat32, proto::ROW_MAJOR, {40});
  ExpectTensor(list, "layers.1.kv_latent_norm", DType::kFloat32, proto::ROW_MAJOR, {64});
  ExpectTensor(list, "layers.1.q", bf16, proto::PANEL64, {5 * 24, 40});
  ExpectTensor(list, "layers.1.k_up", bf16, proto::PANEL64, {5 * 64, 16});
  ExpectTensor(list, "layers.1.v_up", bf16, proto::PANEL64, {5 * 64, 64});
  ExpectTensor(list, "layers.1.o", bf16, proto::PANEL64, {64, 5 * 64});
  EXPECT_EQ(FindIn(list, "layers.0.qkv"), nullptr);
  spec.clear_q_latent();
  list = Required(spec);
  ExpectTensor(list, "layers.0.latents", bf16, proto::PANEL64, {64 + 8, 64});
  ExpectTensor(list, "layers.1.q", bf16, proto::PANEL64, {5 * 24, 64});
  EXPECT_EQ(FindIn(list, "layers.0.q_latent_norm"), nullptr);
}

// Whether weight_quant may name a tensor, and which adapters it takes.
TEST(RequiredTensors, UsesOfWeights) {
  struct Use {
    bool quantizable;
    std::vector<int64_t> modules;
    bool operator==(const Use&) const = default;
  };
  const auto uses_of = [](const proto::DecoderSpec& spec) {
    std::map<std::string, Use> uses;
    for (const RequiredTensor& tensor : Required(spec)) {
      uses[tensor.name] = {tensor.quantizable, tensor.modules};
      EXPECT_TRUE(tensor.shape.size() == 2 || uses[tensor.name] == Use{}) << tensor.name;
    }
    return uses;
  };
  proto::DecoderSpec spec = ExpertSpec();
  spec.set_shared_intermediate_size(192);
  spec.set_learned_positions(true);
  Quantise(spec, "layers.0.qkv", 32)->set_asymmetric(true);
  auto uses = uses_of(spec);
  EXPECT_EQ(uses["embedding"], (Use{true, {128}}));
  EXPECT_EQ(uses["position_embedding"], Use{});
  EXPECT_EQ(uses["lm_head"], (Use{true, {37}}));
  EXPECT_EQ(uses["layers.0.qkv"], (Use{true, {90, 100, 110}}));
  EXPECT_EQ(uses["layers.0.qkv_scale"], Use{});
  EXPECT_EQ(uses["layers.0.qkv_zero"], Use{});
  EXPECT_EQ(uses["layers.0.o"], (Use{true, {128}}));
  EXPECT_EQ(uses["layers.0.gate_up"], (Use{true, {70, 140}}));
  EXPECT_EQ(uses["layers.0.down"], (Use{true, {128}}));
  EXPECT_EQ(uses["layers.1.router"], Use{});
  EXPECT_EQ(uses["layers.1.experts_gate_up"], (Use{true, {}}));
  EXPECT_EQ(uses["layers.1.experts_down"], (Use{true, {}}));
  EXPECT_EQ(uses["layers.1.shared_gate_up"], (Use{true, {192, 384}}));
  EXPECT_EQ(uses["layers.1.shared_down"], (Use{true, {128}}));

  spec = LatentSpec();
  uses = uses_of(spec);
  EXPECT_EQ(uses["layers.0.latents"], (Use{true, {40, 112}}));
  EXPECT_EQ(uses["layers.0.q"], (Use{true, {120}}));
  EXPECT_EQ(uses["layers.0.k_up"], Use{});
  EXPECT_EQ(uses["layers.0.v_up"], Use{});
  EXPECT_EQ(uses["layers.0.o"], (Use{true, {64}}));
  spec.clear_q_latent();
  EXPECT_EQ(uses_of(spec)["layers.0.latents"], (Use{true, {72}}));
  spec = OddSpec(proto::COMPUTE_FLOAT32);
  spec.set_ungated_mlp(true);
  EXPECT_EQ(uses_of(spec)["layers.0.up"], (Use{true, {70}}));
}

TEST(RequiredTensors, RefusesInconsistentLatents) {
  using S = proto::DecoderSpec;
  const std::vector<BadSpec> bad = {
      {[](S& s) { s.clear_kv_latent(), s.clear_latent_norm_eps(); }, {"q_latent is 40", "[0, 0]"}},
      {[](S& s) { s.clear_kv_latent(), s.clear_q_latent(), s.clear_latent_norm_eps(); },
       {"value_dim is 64", "[0, 0]"}},
      {[](S& s) { s.clear_kv_latent(), s.clear_q_latent(), s.clear_value_dim(); },
       {"latent_norm_eps is set", "kv_latent is 0"}},
      {[](S& s) { s.set_kv_latent(-64); }, {"kv_latent is -64"}},
      {[](S& s) { s.set_kv_latent(96); }, {"kv_latent is 96", "multiple of 64"}},
      {[](S& s) { s.set_kv_latent(8192); }, {"kv_latent is 8192", "[1, 8184]"}},
      {[](S& s) { s.set_value_dim(0); }, {"value_dim is 0"}},
      {[](S& s) { s.set_value_dim(32); }, {"value_dim is 32", "multiple of 64"}},
      {[](S& s) { s.set_q_latent(-2); }, {"q_latent is -2"}},
      {[](S& s) { s.set_q_latent(41); }, {"q_latent is 41", "multiple of 2"}},
      {[](S& s) { s.set_num_kv_heads(5); }, {"num_kv_heads is 5", "[1, 1]"}},
      {[](S& s) { s.set_rotary_dim(0); }, {"rotary_dim is 0", "[1, 23]"}},
      {[](S& s) { s.set_rotary_dim(24); }, {"rotary_dim is 24", "[1, 23]"}},
      {[](S& s) { s.set_num_heads(4), s.set_head_dim(23); },
       {"head_dim - rotary_dim is 15", "multiple of 2"}},
      {[](S& s) { s.set_num_heads(60000); }, {"num_heads * (kv_latent + rotary_dim) is 4320000"}},
      {[](S& s) { s.set_qkv_bias(true); }, {"qkv_bias is set"}},
      {[](S& s) { s.set_qk_norm(true); }, {"qk_norm is set"}},
      {[](S& s) { s.set_alibi(true); }, {"alibi is set"}},
      {[](S& s) { s.set_qkv_limit(1.0f); }, {"qkv_limit is set"}},
      {[](S& s) { s.set_qkv_limit(-1.0f); }, {"qkv_limit is -1"}},
      {[](S& s) {
         auto* quant = s.add_weight_quant();
         quant->set_tensor("layers.1.k_up");
         quant->set_bits(8);
       },
       {"layers.1.k_up"}},
  };
  ASSERT_TRUE(RequiredTensors(LatentSpec()).ok());
  for (const BadSpec& item : bad) {
    proto::DecoderSpec spec = LatentSpec();
    item.change(spec);
    const auto list = RequiredTensors(spec);
    ASSERT_FALSE(list.ok()) << item.message[0];
    ExpectError(list.status(), StatusCode::kInvalidArgument, item.message);
  }
}

TEST(RequiredTensors, RefusesInconsistentExperts) {
  using S = proto::DecoderSpec;
  const std::vector<BadSpec> bad = {
      {[](S& s) { s.set_num_experts(0); }, {"experts_per_token is set", "num_experts is 0"}},
      {[](S& s) { s.set_num_experts(1025); }, {"num_experts is 1025", "[1, 1024]"}},
      {[](S& s) { s.set_experts_per_token(7); }, {"experts_per_token is 7", "[1, 6]"}},
      {[](S& s) { s.set_num_experts(64), s.set_experts_per_token(33); },
       {"experts_per_token is 33", "[1, 32]"}},
      {[](S& s) { s.set_expert_intermediate_size(0); }, {"expert_intermediate_size is 0"}},
      {[](S& s) { s.set_expert_intermediate_size(96); },
       {"expert_intermediate_size is 96", "multiple of 64"}},
      {[](S& s) { s.set_shared_intermediate_size(70); }, {"shared_intermediate_size is 70"}},
      {[](S& s) { s.set_hidden_size(96); }, {"hidden_size is 96", "multiple of 64"}},
      {[](S& s) { s.set_shared_gate(true); }, {"shared_gate is true"}},
      {[](S& s) { s.set_mlp_bias(true); }, {"mlp_bias is true"}},
      {[](S& s) { s.add_dense_layers(0); }, {"dense_layers is [0, 0]", "ascending"}},
      {[](S& s) { s.add_dense_layers(2); }, {"dense_layers is [0, 2]", "[0, 2)"}},
      {[](S& s) { s.add_dense_layers(1); }, {"dense_layers is every layer"}},
      {[](S& s) { s.clear_dense_layers(); }, {"intermediate_size is 70", "0 where every layer"}},
      {[](S& s) { s.set_intermediate_size(0); }, {"intermediate_size is 0"}},
      {[](S& s) { s.set_router_score(static_cast<proto::RouterScore>(4)); },
       {"router_score is 4", "0 to 1"}},
      {[](S& s) { s.set_expert_weight_scale(-1.0f); }, {"expert_weight_scale is -1"}},
      {[](S& s) { s.set_used_expert_groups(1); }, {"used_expert_groups is 1", "[0, 0]"}},
      {[](S& s) { s.set_expert_groups(4), s.set_used_expert_groups(1); },
       {"expert_groups is 4", "divisor of num_experts, 6"}},
      {[](S& s) { s.set_expert_groups(2), s.set_used_expert_groups(3); },
       {"used_expert_groups is 3", "[1, 2]"}},
      {[](S& s) { s.set_expert_groups(6), s.set_used_expert_groups(1); },
       {"experts_per_token is 2", "[1, 1]"}},
      {[](S& s) {
         auto* quant = s.add_weight_quant();
         quant->set_tensor("layers.1.router");
         quant->set_bits(8);
       },
       {"layers.1.router"}},
  };
  ASSERT_TRUE(RequiredTensors(ExpertSpec()).ok());
  for (const BadSpec& item : bad) {
    proto::DecoderSpec spec = ExpertSpec();
    item.change(spec);
    const auto list = RequiredTensors(spec);
    ASSERT_FALSE(list.ok()) << item.message[0];
    ExpectError(list.status(), StatusCode::kInvalidArgument, item.message);
  }
}

TEST(RequiredTensors, OddDepthsAreFineInFloat32) {
  proto::DecoderSpec spec = OddSpec(proto::COMPUTE_FLOAT32);
  spec.set_hidden_size(17);
  spec.set_intermediate_size(7);
  EXPECT_TRUE(RequiredTensors(spec).ok());
}

TEST(StoredBytes, RefusesWhatOverflows) {
  RequiredTensor tensor{"t", DType::kFloat32, proto::PANEL64, {INT64_MAX - 5, 1}};
  EXPECT_FALSE(weights::StoredBytes(tensor).ok());
  tensor.shape = {int64_t{1} << 32, int64_t{1} << 30};
  EXPECT_FALSE(weights::StoredBytes(tensor).ok());
  tensor.shape = {0, 4};
  EXPECT_FALSE(weights::StoredBytes(tensor).ok());
  tensor.shape = {65, 3};
  EXPECT_EQ(weights::StoredBytes(tensor).value(), 128 * 3 * 4);
}

TEST(PlanFile, RefusesATotalThatOverflows) {
  const RequiredTensor half{"t", DType::kFloat32, proto::ROW_MAJOR, {int64_t{1} << 60}};
  ExpectError(weights::PlanFile({half, half}).status(), StatusCode::kInvalidArgument,
              {"\"t\"", "more than 2^63 bytes"});
}

TEST(PlanFile, TheLargestLegalSpecHasASize) {
  proto::DecoderSpec spec = OddSpec(proto::COMPUTE_FLOAT32);
  spec.clear_layer_window();
  spec.set_vocab_size(1 << 24);
  spec.set_hidden_size(1 << 20);
  spec.set_num_layers(4096);
  spec.set_intermediate_size(1 << 22);
  spec.set_num_heads(512);
  spec.set_num_kv_heads(512);
  spec.set_head_dim(8192);
  const auto list = RequiredTensors(spec);
  ASSERT_TRUE(list.ok()) << list.status().ToString();
  EXPECT_LE(static_cast<int64_t>(list.value().size()), weights::kMaxTensorRecords);
}

}  // namespace
}  // namespace allspark::testing
