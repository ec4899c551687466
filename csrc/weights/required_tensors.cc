#include "weights/required_tensors.h"

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "weights/experts.h"
#include "weights/format.h"
#include "weights/latents.h"
#include "weights/spec_check.h"

namespace allspark {
namespace {

using weights::CheckEnum;
using weights::CheckInt;
using weights::SpecError;

// Bounds far above any real model. They keep the products below in range, and make absurd files
// cheap to refuse.
constexpr int64_t kMaxVocab = int64_t{1} << 24;
constexpr int64_t kMaxWidth = int64_t{1} << 20;
constexpr int64_t kMaxIntermediate = int64_t{1} << 22;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxHeads = 65536;
constexpr int64_t kMaxHeadDim = 8192;
constexpr int64_t kMaxPosition = int64_t{1} << 24;
constexpr int64_t kMaxWindow = std::numeric_limits<int32_t>::max();

Status CheckFloat(const char* field, float value, const char* bound, bool ok) {
  if (std::isfinite(value) && ok) return Status::Ok();
  return SpecError(field, std::to_string(value), bound);
}

Status CheckSizes(const proto::DecoderSpec& spec) {
  AS_RETURN_IF_ERROR(CheckInt("vocab_size", spec.vocab_size(), 1, kMaxVocab));
  AS_RETURN_IF_ERROR(CheckInt("hidden_size", spec.hidden_size(), 1, kMaxWidth));
  AS_RETURN_IF_ERROR(CheckInt("num_layers", spec.num_layers(), 1, kMaxLayers));
  AS_RETURN_IF_ERROR(CheckInt("num_heads", spec.num_heads(), 1, kMaxHeads));
  AS_RETURN_IF_ERROR(CheckInt("num_kv_heads", spec.num_kv_heads(), 1, kMaxHeads));
  AS_RETURN_IF_ERROR(CheckInt("head_dim", spec.head_dim(), 1, kMaxHeadDim));
  // CheckExperts checks when it must be 0.
  AS_RETURN_IF_ERROR(CheckInt("intermediate_size", spec.intermediate_size(),
                              spec.num_experts() == 0 ? 1 : 0, kMaxIntermediate));
  AS_RETURN_IF_ERROR(CheckInt("max_position", spec.max_position(), 1, kMaxPosition));
  AS_RETURN_IF_ERROR(
      CheckInt("num_heads * head_dim", spec.num_heads() * spec.head_dim(), 1, kMaxIntermediate));
  if (spec.num_heads() % spec.num_kv_heads() != 0) {
    return SpecError("num_heads", std::to_string(spec.num_heads()),
                     "a multiple of num_kv_heads, " + std::to_string(spec.num_kv_heads()));
  }
  return Status::Ok();
}

Status CheckRopeAndWindows(const proto::DecoderSpec& spec) {
  AS_RETURN_IF_ERROR(CheckInt("rotary_dim", spec.rotary_dim(), 0, spec.head_dim()));
  if (spec.rotary_dim() % 2 != 0) {
    return SpecError("rotary_dim", std::to_string(spec.rotary_dim()), "even");
  }
  if (spec.window_rope() && (spec.rotary_dim() == 0 || spec.layer_window_size() == 0)) {
    return SpecError("window_rope", "true", "false without rotary_dim and layer_window");
  }
  if (spec.layer_window_size() != 0 && spec.layer_window_size() != spec.num_layers()) {
    return Status::InvalidArgument("layer_window has " + std::to_string(spec.layer_window_size()) +
                                   " values; it must have none or num_layers, " +
                                   std::to_string(spec.num_layers()));
  }
  for (int i = 0; i < spec.layer_window_size(); ++i) {
    const std::string field = "layer_window[" + std::to_string(i) + "]";
    AS_RETURN_IF_ERROR(CheckInt(field, spec.layer_window(i), 0, kMaxWindow));
  }
  return Status::Ok();
}

Status CheckFloatsAndEnums(const proto::DecoderSpec& spec) {
  AS_RETURN_IF_ERROR(CheckFloat("norm_eps", spec.norm_eps(), "in [0, 1]",
                                spec.norm_eps() >= 0.0f && spec.norm_eps() <= 1.0f));
  const std::pair<const char*, float> scales[] = {
      {"rope_attention_scaling", spec.rope_attention_scaling()},
      {"attention_scale", spec.attention_scale()},
      {"attention_soft_cap", spec.attention_soft_cap()},
      {"embedding_scale", spec.embedding_scale()},
      {"residual_scale", spec.residual_scale()},
      {"logits_scale", spec.logits_scale()},
      {"logits_soft_cap", spec.logits_soft_cap()},
      {"latent_norm_eps", spec.latent_norm_eps()},
      {"qkv_limit", spec.qkv_limit()},
      {"expert_weight_scale", spec.expert_weight_scale()}};
  for (const auto& [field, value] : scales) {
    AS_RETURN_IF_ERROR(CheckFloat(field, value, "finite and not negative", value >= 0.0f));
  }
  AS_RETURN_IF_ERROR(CheckEnum("norm_placement", spec.norm_placement(), "NormPlacement",
                               proto::NormPlacement_IsValid, proto::NormPlacement_MAX));
  if (spec.qk_norm_whole() && !spec.qk_norm()) {
    return SpecError("qk_norm_whole", "true", "false without qk_norm");
  }
  AS_RETURN_IF_ERROR(CheckEnum("norm_kind", spec.norm_kind(), "NormKind", proto::NormKind_IsValid,
                               proto::NormKind_MAX));
  if (spec.norm_bias() && spec.norm_kind() != proto::LAYER_NORM) {
    return SpecError("norm_bias", "true", "false without LAYER_NORM");
  }
  if (spec.parallel_residual() && spec.norm_placement() != proto::NORM_BEFORE) {
    return SpecError("parallel_residual", "true", "false without NORM_BEFORE");
  }
  if (spec.shared_norm() && !spec.parallel_residual()) {
    return SpecError("shared_norm", "true", "false without parallel_residual");
  }
  AS_RETURN_IF_ERROR(CheckEnum("activation", spec.activation(), "Activation",
                               proto::Activation_IsValid, proto::Activation_MAX));
  if (spec.compute_type() < proto::COMPUTE_FLOAT32 ||
      spec.compute_type() > proto::COMPUTE_FLOAT16) {
    return SpecError("compute_type", std::to_string(spec.compute_type()),
                     "1 (float32), 2 (bfloat16) or 3 (float16)");
  }
  return Status::Ok();
}

Status CheckGemmDepths(const proto::DecoderSpec& spec) {
  const int64_t group = weights::LaneOf(weights::FloatDType(spec), proto::PANEL64).elements;
  const std::pair<const char*, int64_t> depths[] = {
      {"hidden_size", spec.hidden_size()},
      {"num_heads * head_dim", spec.num_heads() * spec.head_dim()},
      {"q_latent", spec.q_latent()},
      {"head_dim - rotary_dim", spec.kv_latent() > 0 ? spec.head_dim() - spec.rotary_dim() : 0},
      {"intermediate_size", spec.intermediate_size()}};
  for (const auto& [field, k] : depths) {
    if (k % group == 0) continue;
    return SpecError(
        field, std::to_string(k),
        "a multiple of " + std::to_string(group) + ", the pack group of the compute type");
  }
  return Status::Ok();
}

// The entries of weight_quant by tensor; an entry is removed when its tensor is listed.
using QuantMap = std::map<std::string, const proto::WeightQuant*, std::less<>>;

Status QuantError(const proto::WeightQuant& quant, const std::string& what) {
  return Status::InvalidArgument("weight_quant of \"" + quant.tensor() + "\": " + what);
}

Status CheckGroupSize(const proto::WeightQuant& quant, const char* field, int64_t size,
                      bool may_be_16) {
  if (size == 0 || size == 32 || size == 64 || size == 128) return Status::Ok();
  if (size == 16 && may_be_16) return Status::Ok();
  return QuantError(quant, std::string(field) + " is " + std::to_string(size) + "; it must be 0, " +
                               (may_be_16 ? "16, " : "") + "32, 64 or 128");
}

// What an entry says of integers, zero points, offsets, tables and floats must go together.
Status CheckQuantForm(const proto::WeightQuant& quant) {
  const int32_t bits = quant.bits();
  if (bits != 4 && bits != 6 && bits != 8) {
    return QuantError(quant, "bits is " + std::to_string(bits) + "; it must be 4, 6 or 8");
  }
  const bool has_table = !quant.table().empty();
  if (has_table && quant.table().size() != 16) {
    return QuantError(quant, "table has " + std::to_string(quant.table().size()) +
                                 " numbers; it must have 16, or none");
  }
  if (has_table && bits != 4) {
    return QuantError(quant, "bits is " + std::to_string(bits) + "; it must be 4 with a table");
  }
  if (quant.float8() && bits != 8) {
    return QuantError(quant, "bits is " + std::to_string(bits) + "; it must be 8 with float8");
  }
  if (quant.asymmetric() && (bits == 6 || quant.offset() || has_table || quant.float8())) {
    return QuantError(quant,
                      "asymmetric is true; it must be false with 6 bits, offset, table or "
                      "float8");
  }
  if (quant.offset() && (has_table || quant.float8())) {
    return QuantError(quant, "offset is true; it must be false with table or float8");
  }
  if (quant.float8() && quant.quantize_activations()) {
    return QuantError(quant, "quantize_activations is true; it must be false with float8");
  }
  if (quant.group_size() == 0 &&
      (bits == 6 || quant.offset() || has_table || quant.scale_codes())) {
    return QuantError(quant,
                      "group_size is 0; it must be 16, 32, 64 or 128 with 6 bits, offset, table or "
                      "scale_codes");
  }
  if (quant.half_scales() + quant.power_scales() + quant.scale_codes() > 1) {
    return QuantError(quant,
                      "at most one of half_scales, power_scales and scale_codes may be true");
  }
  if (quant.power_scales() && quant.offset()) {
    return QuantError(quant, "offset is true; it must be false with power_scales");
  }
  return Status::Ok();
}

Result<QuantMap> IndexQuants(const proto::DecoderSpec& spec) {
  QuantMap quants;
  for (const proto::WeightQuant& quant : spec.weight_quant()) {
    if (!quants.emplace(quant.tensor(), &quant).second) {
      return QuantError(quant, "is there twice");
    }
    AS_RETURN_IF_ERROR(CheckQuantForm(quant));
    AS_RETURN_IF_ERROR(CheckGroupSize(quant, "group_size", quant.group_size(), true));
    const int64_t activation_group = quant.activation_group_size();
    AS_RETURN_IF_ERROR(CheckGroupSize(quant, "activation_group_size", activation_group, false));
    if (activation_group != 0 && !quant.quantize_activations()) {
      return QuantError(quant, "activation_group_size is " + std::to_string(activation_group) +
                                   "; it must be 0 without quantize_activations");
    }
    if (activation_group != 0 && quant.reordered()) {
      return QuantError(quant, "activation_group_size is " + std::to_string(activation_group) +
                                   "; it must be 0 with reordered columns");
    }
    if (quant.reordered() && quant.group_size() == 0) {
      return QuantError(quant, "reordered is true; it must be false without a group_size");
    }
    if (quant.tensor() == "embedding" && !spec.tie_embeddings() && quant.quantize_activations()) {
      return QuantError(quant,
                        "quantize_activations is true; it must be false where tie_embeddings is, "
                        "as rows are only looked up");
    }
  }
  return quants;
}

// The input features must fill whole lanes of a panel and whole groups.
Status CheckQuantDepth(const proto::WeightQuant& quant, int64_t k) {
  const DType dtype = quant.bits() == 6 ? DType::kUInt2 : weights::QuantDType(quant);
  const int64_t lane = weights::LaneOf(dtype, proto::PANEL64).elements;
  const std::string subject = "it has " + std::to_string(k) + " input features; they must be ";
  if (k % lane != 0) {
    return QuantError(quant, subject + "a multiple of " + std::to_string(lane) + " for " +
                                 std::to_string(quant.bits()) + " bits");
  }
  const std::pair<const char*, int64_t> groups[] = {
      {"group_size", quant.group_size()},
      {"activation_group_size", quant.activation_group_size()},
      {"the blocks of scale_codes", quant.scale_codes() ? weights::kScaleBlock : 0}};
  for (const auto& [field, size] : groups) {
    if (size == 0 || k % size == 0) continue;
    return QuantError(quant, subject + "a multiple of " + field + ", " + std::to_string(size));
  }
  return Status::Ok();
}

// Where the output features of the modules of a weight end (RequiredTensor::modules).
using Modules = std::vector<int64_t>;

// Appends to one list; a matrix has the shape [out_features, in_features].
class ListBuilder {
 public:
  ListBuilder(DType floats, QuantMap quants) : floats_(floats), quants_(std::move(quants)) {}

  void Gemm(const std::string& name, int64_t n, int64_t k, Modules modules) {
    Matrix(name, proto::PANEL64, n, k, /*can_be_reordered=*/true, std::move(modules));
  }
  // A weight whose columns are never reordered: of experts, or also used as a table.
  void GemmInPlace(const std::string& name, int64_t n, int64_t k, Modules modules) {
    Matrix(name, proto::PANEL64, n, k, /*can_be_reordered=*/false, std::move(modules));
  }
  // A weight that is never quantised, and takes no adapters.
  void PlainGemm(const std::string& name, int64_t n, int64_t k) {
    list_.push_back({name, floats_, proto::PANEL64, {n, k}});
  }
  void Table(const std::string& name, int64_t rows, int64_t cols, Modules modules) {
    Matrix(name, proto::ROW_MAJOR, rows, cols, /*can_be_reordered=*/false, std::move(modules));
  }
  // A table that is never quantised, and takes no adapters.
  void PlainTable(const std::string& name, int64_t rows, int64_t cols) {
    list_.push_back({name, floats_, proto::ROW_MAJOR, {rows, cols}});
  }
  void Vector(const std::string& name, int64_t size) {
    list_.push_back({name, DType::kFloat32, proto::ROW_MAJOR, {size}});
  }
  // A norm of the residual stream.
  void Norm(const proto::DecoderSpec& spec, const std::string& name) {
    Vector(name, spec.hidden_size());
    if (spec.norm_bias()) Vector(name + "_bias", spec.hidden_size());
  }
  // Returns the list. Fails if an entry of weight_quant does not fit its tensor, or has no tensor.
  Result<std::vector<RequiredTensor>> Take() {
    AS_RETURN_IF_ERROR(status_);
    if (!quants_.empty()) {
      return QuantError(*quants_.begin()->second,
                        "it is neither the weight of a matrix product nor the embedding of this "
                        "spec");
    }
    return std::move(list_);
  }

 private:
  void Matrix(const std::string& name, proto::Layout layout, int64_t n, int64_t k,
              bool can_be_reordered, Modules modules) {
    const auto found = quants_.find(name);
    if (found == quants_.end()) {
      list_.push_back({name, floats_, layout, {n, k}, true, std::move(modules)});
      return;
    }
    const proto::WeightQuant& quant = *found->second;
    quants_.erase(found);
    if (status_.ok()) status_ = CheckQuantDepth(quant, k);
    if (status_.ok() && quant.reordered() && !can_be_reordered) {
      status_ =
          QuantError(quant, "reordered is true; it must be false of embeddings and of experts");
    }
    if (!status_.ok()) return;
    const int64_t groups = quant.group_size() == 0 ? 1 : k / quant.group_size();
    const proto::Layout beside = proto::PANEL64_SCALE;
    const DType scale = weights::ScaleDType(quant);
    list_.push_back(
        {name, weights::QuantDType(quant), proto::PANEL64, {n, k}, true, std::move(modules)});
    if (quant.bits() == 6) {
      list_.push_back({weights::HighName(name), DType::kUInt2, proto::PANEL64, {n, k}});
    }
    list_.push_back({weights::ScaleName(name), scale, beside, {n, groups}});
    if (quant.offset()) {
      list_.push_back({weights::OffsetName(name), scale, beside, {n, groups}});
    }
    if (quant.scale_codes()) {
      const int64_t blocks = k / weights::kScaleBlock;
      list_.push_back({weights::BlockScaleName(name), DType::kFloat16, beside, {n, blocks}});
      if (quant.offset()) {
        list_.push_back({weights::BlockOffsetName(name), DType::kFloat16, beside, {n, blocks}});
      }
    }
    if (quant.asymmetric()) {
      list_.push_back({weights::ZeroName(name), DType::kUInt8, beside, {n, groups}});
    }
    if (quant.reordered()) {
      list_.push_back({weights::OrderName(name), DType::kInt32, proto::ROW_MAJOR, {k}});
    }
  }

  const DType floats_;
  QuantMap quants_;  // not listed yet
  std::vector<RequiredTensor> list_;
  Status status_;
};

void AddDenseMlp(const proto::DecoderSpec& spec, const std::string& prefix, ListBuilder& list) {
  const int64_t hidden = spec.hidden_size(), inner = spec.intermediate_size();
  const std::string up = prefix + (spec.ungated_mlp() ? "up" : "gate_up");
  const int64_t up_size = spec.ungated_mlp() ? inner : 2 * inner;
  list.Gemm(up, up_size, hidden, spec.ungated_mlp() ? Modules{inner} : Modules{inner, up_size});
  if (spec.mlp_bias()) list.Vector(up + "_bias", up_size);
  list.Gemm(prefix + "down", hidden, inner, {hidden});
  if (spec.mlp_bias()) list.Vector(prefix + "down_bias", hidden);
}

// The experts' matrices are stored one after the other in one tensor each, quantised alike. So a
// layer has few records, whatever its number of experts. Only the shared expert takes adapters.
void AddExperts(const proto::DecoderSpec& spec, const std::string& prefix, ListBuilder& list) {
  const int64_t hidden = spec.hidden_size(), experts = spec.num_experts();
  const int64_t inner = spec.expert_intermediate_size(), shared = spec.shared_intermediate_size();
  list.PlainGemm(prefix + "router", weights::RouterRows(spec), hidden);
  if (spec.router_bias()) list.Vector(prefix + "router_bias", experts);
  list.GemmInPlace(prefix + "experts_gate_up", experts * 2 * inner, hidden, {});
  list.GemmInPlace(prefix + "experts_down", experts * hidden, inner, {});
  if (shared == 0) return;
  list.GemmInPlace(prefix + "shared_gate_up", 2 * shared, hidden, {shared, 2 * shared});
  list.GemmInPlace(prefix + "shared_down", hidden, shared, {hidden});
}

// Each head's matrices take whole panels, one head after the other.
void AddLatents(const proto::DecoderSpec& spec, const std::string& prefix, ListBuilder& list) {
  const int64_t hidden = spec.hidden_size(), heads = spec.num_heads();
  const int64_t kv_latent = spec.kv_latent(), q_latent = spec.q_latent();
  const int64_t latents = q_latent + kv_latent + spec.rotary_dim();
  list.Gemm(prefix + "latents", latents, hidden,
            q_latent > 0 ? Modules{q_latent, latents} : Modules{latents});
  if (q_latent > 0) list.Vector(prefix + "q_latent_norm", q_latent);
  list.Vector(prefix + "kv_latent_norm", kv_latent);
  const int64_t q_size = heads * spec.head_dim();
  list.Gemm(prefix + "q", q_size, q_latent > 0 ? q_latent : hidden, {q_size});
  list.PlainGemm(prefix + "k_up", heads * kv_latent, spec.head_dim() - spec.rotary_dim());
  list.PlainGemm(prefix + "v_up", heads * spec.value_dim(), kv_latent);
  list.Gemm(prefix + "o", hidden, heads * spec.value_dim(), {hidden});
}

void AddQkv(const proto::DecoderSpec& spec, const std::string& prefix, ListBuilder& list) {
  const int64_t hidden = spec.hidden_size();
  const int64_t q_size = spec.num_heads() * spec.head_dim();
  const int64_t kv_size = spec.num_kv_heads() * spec.head_dim();
  list.Gemm(prefix + "qkv", q_size + 2 * kv_size, hidden,
            {q_size, q_size + kv_size, q_size + 2 * kv_size});
  if (spec.qkv_bias()) list.Vector(prefix + "qkv_bias", q_size + 2 * kv_size);
  if (spec.qk_norm()) {
    list.Vector(prefix + "q_norm", spec.qk_norm_whole() ? q_size : spec.head_dim());
    list.Vector(prefix + "k_norm", spec.qk_norm_whole() ? kv_size : spec.head_dim());
  }
  list.Gemm(prefix + "o", hidden, q_size, {hidden});
}

void AddLayer(const proto::DecoderSpec& spec, int64_t layer, ListBuilder& list) {
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  const bool before = spec.norm_placement() != proto::NORM_AFTER;
  const bool after = spec.norm_placement() != proto::NORM_BEFORE;
  if (before) list.Norm(spec, prefix + "attention_norm");
  if (spec.kv_latent() > 0) {
    AddLatents(spec, prefix, list);
  } else {
    AddQkv(spec, prefix, list);
  }
  if (spec.o_bias()) list.Vector(prefix + "o_bias", spec.hidden_size());
  if (after) list.Norm(spec, prefix + "attention_post_norm");
  if (before && !spec.shared_norm()) list.Norm(spec, prefix + "mlp_norm");
  if (weights::HasExperts(spec, layer)) {
    AddExperts(spec, prefix, list);
  } else {
    AddDenseMlp(spec, prefix, list);
  }
  if (after) list.Norm(spec, prefix + "mlp_post_norm");
}

}  // namespace

Result<std::vector<RequiredTensor>> RequiredTensors(const proto::DecoderSpec& spec) {
  AS_RETURN_IF_ERROR(CheckSizes(spec));
  AS_RETURN_IF_ERROR(CheckRopeAndWindows(spec));
  AS_RETURN_IF_ERROR(CheckFloatsAndEnums(spec));
  AS_RETURN_IF_ERROR(weights::CheckExperts(spec, kMaxIntermediate));
  AS_RETURN_IF_ERROR(weights::CheckLatents(spec, kMaxHeadDim, kMaxIntermediate));
  AS_RETURN_IF_ERROR(CheckGemmDepths(spec));
  AS_ASSIGN_OR_RETURN(QuantMap quants, IndexQuants(spec));
  ListBuilder list(weights::FloatDType(spec), std::move(quants));
  const int64_t vocab = spec.vocab_size(), hidden = spec.hidden_size();
  if (spec.tie_embeddings()) {
    list.GemmInPlace("embedding", vocab, hidden, {hidden});
  } else {
    list.Table("embedding", vocab, hidden, {hidden});
  }
  if (spec.learned_positions()) {
    list.PlainTable("position_embedding", spec.max_position(), hidden);
  }
  if (spec.embedding_norm()) list.Norm(spec, "embedding_norm");
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) AddLayer(spec, layer, list);
  list.Norm(spec, "final_norm");
  if (!spec.tie_embeddings()) list.Gemm("lm_head", vocab, hidden, {vocab});
  if (spec.lm_head_bias()) list.Vector("lm_head_bias", vocab);
  if (spec.rotary_dim() > 0) list.Vector("rope.inv_freq", spec.rotary_dim() / 2);
  if (spec.window_rope()) list.Vector("rope.window_inv_freq", spec.rotary_dim() / 2);
  if (spec.alibi()) list.Vector("alibi.slopes", spec.num_heads());
  AS_ASSIGN_OR_RETURN(std::vector<RequiredTensor> tensors, list.Take());
  AS_RETURN_IF_ERROR(weights::PlanFile(tensors).status());
  return tensors;
}

}  // namespace allspark
