#include "model/decoder_shape.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/field_list.h"
#include "tensor/tensor_view.h"
#include "weights/experts.h"
#include "weights/format.h"
#include "weights/required_tensors.h"

namespace allspark {
namespace {

static_assert(static_cast<int>(kernels::Activation::kSilu) == proto::SILU);
static_assert(static_cast<int>(kernels::Activation::kGeluTanh) == proto::GELU_TANH);
static_assert(static_cast<int>(kernels::Activation::kGeluErf) == proto::GELU_ERF);
static_assert(static_cast<int>(kernels::Activation::kRelu) == proto::RELU);
static_assert(static_cast<int>(kernels::RouterScore::kSoftmax) == proto::ROUTER_SOFTMAX);
static_assert(static_cast<int>(kernels::RouterScore::kSigmoid) == proto::ROUTER_SIGMOID);

// Kernels read weights as files hold them.
static_assert(kernels::kPanelColumns == weights::kPanelColumns);
static_assert(kernels::kScaleBlock == weights::kScaleBlock);
static_assert(kernels::SymmetricZero(4) == weights::SymmetricZero(4));
static_assert(kernels::SymmetricZero(6) == weights::SymmetricZero(6));
static_assert(kernels::SymmetricZero(8) == weights::SymmetricZero(8));
static_assert(kernels::kMaxRoutedExperts == weights::kMaxExperts);
static_assert(kernels::kMaxExpertsPerToken == weights::kMaxExpertsPerToken);
static_assert(kernels::kMaxExpertGroups == weights::kMaxExpertGroups);

// The scale that a spec means: 1 if the field is absent.
float OneIfZero(float scale) { return scale == 0.0f ? 1.0f : scale; }

RouterParams MakeRouter(const proto::DecoderSpec& spec) {
  RouterParams router;
  router.num_experts = spec.num_experts();
  router.top_k = spec.experts_per_token();
  router.score = static_cast<kernels::RouterScore>(spec.router_score());
  router.normalize = spec.normalize_expert_weights();
  router.scale = OneIfZero(spec.expert_weight_scale());
  router.groups = std::max<int64_t>(spec.expert_groups(), 1);
  router.used_groups = std::max<int64_t>(spec.used_expert_groups(), 1);
  router.has_shared = spec.shared_intermediate_size() > 0;
  router.shared_gate = spec.shared_gate();
  return router;
}

Status Missing(const DeviceOps& ops, const std::string& op, DType dtype) {
  return Status::Unimplemented("kernel table '" + std::string(ops.name()) + "' has no " + op +
                               " for " + DTypeName(dtype));
}

}  // namespace

Result<DecoderShape> MakeDecoderShape(const proto::DecoderSpec& spec, CacheMode cache_mode) {
  // RequiredTensors checks the spec's sizes, heads, rope, windows and enums.
  AS_ASSIGN_OR_RETURN(const auto required, RequiredTensors(spec));
  DecoderShape shape;
  shape.vocab_size = spec.vocab_size();
  shape.hidden = spec.hidden_size();
  shape.num_layers = spec.num_layers();
  shape.q_heads = spec.num_heads();
  shape.kv_heads = spec.num_kv_heads();
  shape.kv_latent = spec.kv_latent();
  shape.q_latent = spec.q_latent();
  shape.query_dim = spec.head_dim();
  shape.head_dim = shape.has_latents() ? spec.kv_latent() + spec.rotary_dim() : spec.head_dim();
  shape.value_dim = shape.has_latents() ? spec.value_dim() : spec.head_dim();
  shape.intermediate = spec.intermediate_size();
  shape.norm_eps = spec.norm_eps();
  shape.activation = static_cast<kernels::Activation>(spec.activation());
  shape.tie_embeddings = spec.tie_embeddings();
  shape.qk_norm = spec.qk_norm();
  shape.max_position = spec.max_position();
  shape.rotary_dim = spec.rotary_dim();
  shape.rope_interleaved = spec.rope_interleaved();
  shape.rope_scaling = OneIfZero(spec.rope_attention_scaling());
  shape.attention_scale = spec.attention_scale() == 0.0f
                              ? static_cast<float>(1.0 / std::sqrt(double(spec.head_dim())))
                              : spec.attention_scale();
  shape.attention_soft_cap = spec.attention_soft_cap();
  shape.embedding_scaling.scale = OneIfZero(spec.embedding_scale());
  shape.residual_scaling.scale = OneIfZero(spec.residual_scale());
  shape.logits_scaling = {OneIfZero(spec.logits_scale()), spec.logits_soft_cap()};
  shape.qkv_scaling.limit = spec.qkv_limit();
  shape.norm_before = spec.norm_placement() != proto::NORM_AFTER;
  shape.norm_after = spec.norm_placement() != proto::NORM_BEFORE;
  shape.qk_norm_whole = spec.qk_norm_whole();
  shape.window_rope = spec.window_rope();
  shape.layer_norm = spec.norm_kind() == proto::LAYER_NORM;
  shape.gated_mlp = !spec.ungated_mlp();
  shape.parallel_residual = spec.parallel_residual();
  shape.shared_norm = spec.shared_norm();
  shape.learned_positions = spec.learned_positions();
  shape.router = MakeRouter(spec);
  shape.expert_intermediate = spec.expert_intermediate_size();
  shape.shared_intermediate = spec.shared_intermediate_size();
  shape.compute =
      spec.compute_type() == proto::COMPUTE_BFLOAT16 ? DType::kBFloat16 : DType::kFloat32;
  shape.cache = cache_mode == CacheMode::kQuantI8     ? DType::kInt8
                : cache_mode == CacheMode::kQuantU4   ? DType::kUInt4
                : cache_mode == CacheMode::kQuantK8V4 ? DType::kInt8UInt4
                                                      : shape.compute;
  // A key has few elements that are much larger than the others, which set the scale of all.
  shape.rotates_keys = shape.cache == DType::kUInt4;
  shape.int8_activations =
      std::any_of(spec.weight_quant().begin(), spec.weight_quant().end(),
                  [](const proto::WeightQuant& quant) { return quant.quantize_activations(); });
  for (const RequiredTensor& tensor : required) {
    if (tensor.dtype == DType::kInt32 && !tensor.name.ends_with(".down_order")) {
      shape.reordered_cols = std::max(shape.reordered_cols, tensor.shape[0]);
    }
  }
  if (shape.cache != DType::kFloat32 && shape.head_dim % 2 != 0) {
    return Status::Unimplemented("cache_mode is " + FormatValue(cache_mode) + " and head_dim is " +
                                 std::to_string(shape.head_dim) +
                                 "; elements lie in pairs, which need an even one");
  }
  return shape;
}

Status CheckLearnedPositions(const DecoderShape& shape, int64_t max_length) {
  if (!shape.learned_positions || max_length <= shape.max_position) return Status::Ok();
  return Status::InvalidArgument("max_length is " + std::to_string(max_length) +
                                 "; the model has embeddings of " +
                                 std::to_string(shape.max_position) + " positions");
}

const proto::WeightQuant* FindWeightQuant(const proto::DecoderSpec& spec,
                                          const std::string& tensor) {
  for (const proto::WeightQuant& quant : spec.weight_quant()) {
    if (quant.tensor() == tensor) return &quant;
  }
  return nullptr;
}

InputFormat InputFormatOf(const proto::WeightQuant* quant, DType compute) {
  if (quant == nullptr || !quant->quantize_activations()) return compute;
  return {DType::kInt8, quant->activation_group_size()};
}

namespace {

const char* NormName(const DecoderShape& shape) {
  return shape.layer_norm ? "layer_norm" : "rms_norm";
}

bool HasNorm(const DecoderShape& shape, const DeviceOps& ops, DType dtype) {
  return ops.Has(shape.layer_norm ? OpKind::kLayerNorm : OpKind::kRmsNorm, dtype);
}

Status CheckQuantOps(const DecoderShape& shape, const proto::DecoderSpec& spec,
                     const DeviceOps& ops) {
  for (const proto::WeightQuant& quant : spec.weight_quant()) {
    const DType weight = weights::QuantDType(quant),
                input = InputFormatOf(&quant, shape.compute).dtype;
    if (!ops.Has(OpKind::kLinear, weight, input)) {
      return Missing(ops, "gemm", weight);
    }
    if (quant.reordered() && !ops.Has(OpKind::kGatherColumns, input)) {
      return Missing(ops, "gather_columns", input);
    }
    if (quant.tensor() == "embedding" && !ops.Has(OpKind::kEmbedding, weight)) {
      return Missing(ops, "embedding", weight);
    }
    if (!quant.quantize_activations()) continue;
    if (!ops.Has(OpKind::kQuantize)) return Missing(ops, "quantize", DType::kInt8);
    if (!HasNorm(shape, ops, DType::kFloat32) || !ops.Has(OpKind::kGatedAct, DType::kFloat32) ||
        !ops.Has(OpKind::kAttention, shape.cache, DType::kFloat32)) {
      return Missing(ops, std::string(NormName(shape)) + ", gated_act or attention",
                     DType::kFloat32);
    }
    if (quant.group_size() == 0 && quant.activation_group_size() == 0 &&
        shape.widest_input() > kMostByteSum) {
      return Status::Unimplemented("weight_quant of '" + quant.tensor() +
                                   "': int8 activations with one scale per output feature need at "
                                   "most " +
                                   std::to_string(kMostByteSum) +
                                   " input features; set a group_size or activation_group_size");
    }
  }
  return Status::Ok();
}

}  // namespace

Status CheckOps(const DecoderShape& shape, const proto::DecoderSpec& spec, const DeviceOps& ops) {
  AS_RETURN_IF_ERROR(CheckQuantOps(shape, spec, ops));
  const DType compute = shape.compute;
  constexpr DType kFloat = DType::kFloat32;
  const DType floats = weights::FloatDType(spec);
  if (!ops.Has(OpKind::kEmbedding, floats)) return Missing(ops, "embedding", floats);
  for (const DType dtype : {compute, kFloat}) {  // float32: of the last hidden states
    if (!HasNorm(shape, ops, dtype)) return Missing(ops, NormName(shape), dtype);
  }
  if (shape.qk_norm && !ops.Has(OpKind::kRmsNorm, kFloat)) return Missing(ops, "rms_norm", kFloat);
  if (!ops.Has(OpKind::kLinear, floats, compute)) return Missing(ops, "gemm", floats);
  if (shape.rotary_dim > 0 && !ops.Has(OpKind::kRope)) return Missing(ops, "rope", kFloat);
  const bool scales = shape.has_addend() || !shape.embedding_scaling.is_identity() ||
                      !shape.logits_scaling.is_identity() || !shape.qkv_scaling.is_identity() ||
                      shape.has_latents();
  if (scales && !ops.Has(OpKind::kScale)) return Missing(ops, "scale", kFloat);
  if ((!shape.norm_before || shape.has_latents()) && compute != kFloat &&
      !ops.Has(OpKind::kConvert, kFloat, compute)) {
    return Missing(ops, "convert", compute);
  }
  if (shape.has_experts() && (!ops.Has(OpKind::kRoute) || !ops.Has(OpKind::kCombine))) {
    return Missing(ops, "route or combine", kFloat);
  }
  if (shape.rotates_keys && !ops.Has(OpKind::kHadamard)) return Missing(ops, "hadamard", kFloat);
  if (!ops.Has(OpKind::kKvWrite, shape.cache)) return Missing(ops, "kv_write", shape.cache);
  if (!ops.Has(OpKind::kAttention, shape.cache, compute)) {
    return Missing(ops, "attention", shape.cache);
  }
  if (!ops.Has(OpKind::kGatedAct, compute)) return Missing(ops, "gated_act", compute);
  return Status::Ok();
}

}  // namespace allspark
