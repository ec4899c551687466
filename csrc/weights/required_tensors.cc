#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "weights/format.h"
#include "weights/model_reader.h"

namespace allspark {
namespace {

// Bounds far above any real model: they keep every product below in range and absurd files cheap to
// refuse.
constexpr int64_t kMaxVocab = int64_t{1} << 24;
constexpr int64_t kMaxWidth = int64_t{1} << 20;
constexpr int64_t kMaxIntermediate = int64_t{1} << 22;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxHeads = 65536;
constexpr int64_t kMaxHeadDim = 8192;
constexpr int64_t kMaxPosition = int64_t{1} << 24;
constexpr int64_t kMaxWindow = std::numeric_limits<int32_t>::max();

Status CheckInt(const char* field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return Status::Ok();
  return Status::InvalidArgument(std::string(field) + " is " + std::to_string(value) +
                                 "; it must be in [" + std::to_string(min) + ", " +
                                 std::to_string(max) + "]");
}

Status CheckFloat(const char* field, float value, const char* bound, bool ok) {
  if (std::isfinite(value) && ok) return Status::Ok();
  return Status::InvalidArgument(std::string(field) + " is " + std::to_string(value) +
                                 "; it must be " + bound);
}

Status CheckSizes(const proto::DecoderSpec& spec) {
  AS_RETURN_IF_ERROR(CheckInt("vocab_size", spec.vocab_size(), 1, kMaxVocab));
  AS_RETURN_IF_ERROR(CheckInt("hidden_size", spec.hidden_size(), 1, kMaxWidth));
  AS_RETURN_IF_ERROR(CheckInt("num_layers", spec.num_layers(), 1, kMaxLayers));
  AS_RETURN_IF_ERROR(CheckInt("num_heads", spec.num_heads(), 1, kMaxHeads));
  AS_RETURN_IF_ERROR(CheckInt("num_kv_heads", spec.num_kv_heads(), 1, kMaxHeads));
  AS_RETURN_IF_ERROR(CheckInt("head_dim", spec.head_dim(), 1, kMaxHeadDim));
  AS_RETURN_IF_ERROR(CheckInt("intermediate_size", spec.intermediate_size(), 1, kMaxIntermediate));
  AS_RETURN_IF_ERROR(CheckInt("max_position", spec.max_position(), 1, kMaxPosition));
  AS_RETURN_IF_ERROR(
      CheckInt("num_heads * head_dim", spec.num_heads() * spec.head_dim(), 1, kMaxIntermediate));
  if (spec.num_heads() % spec.num_kv_heads() != 0) {
    return Status::InvalidArgument("num_heads is " + std::to_string(spec.num_heads()) +
                                   "; it must be a multiple of num_kv_heads, " +
                                   std::to_string(spec.num_kv_heads()));
  }
  return Status::Ok();
}

Status CheckRopeAndWindows(const proto::DecoderSpec& spec) {
  AS_RETURN_IF_ERROR(CheckInt("rotary_dim", spec.rotary_dim(), 0, spec.head_dim()));
  if (spec.rotary_dim() % 2 != 0) {
    return Status::InvalidArgument("rotary_dim is " + std::to_string(spec.rotary_dim()) +
                                   "; it must be even");
  }
  if (spec.layer_window_size() != 0 && spec.layer_window_size() != spec.num_layers()) {
    return Status::InvalidArgument("layer_window has " + std::to_string(spec.layer_window_size()) +
                                   " values; it must have none or num_layers, " +
                                   std::to_string(spec.num_layers()));
  }
  for (int i = 0; i < spec.layer_window_size(); ++i) {
    const std::string field = "layer_window[" + std::to_string(i) + "]";
    AS_RETURN_IF_ERROR(CheckInt(field.c_str(), spec.layer_window(i), 0, kMaxWindow));
  }
  return Status::Ok();
}

Status CheckFloatsAndEnums(const proto::DecoderSpec& spec) {
  AS_RETURN_IF_ERROR(CheckFloat("norm_eps", spec.norm_eps(), "in [0, 1]",
                                spec.norm_eps() >= 0.0f && spec.norm_eps() <= 1.0f));
  AS_RETURN_IF_ERROR(CheckFloat("rope_attention_scaling", spec.rope_attention_scaling(),
                                "finite and not negative", spec.rope_attention_scaling() >= 0.0f));
  AS_RETURN_IF_ERROR(CheckFloat("attention_scale", spec.attention_scale(),
                                "finite and not negative", spec.attention_scale() >= 0.0f));
  AS_RETURN_IF_ERROR(CheckFloat("attention_soft_cap", spec.attention_soft_cap(),
                                "finite and not negative", spec.attention_soft_cap() >= 0.0f));
  if (!proto::Activation_IsValid(spec.activation())) {
    return Status::InvalidArgument("activation is " + std::to_string(spec.activation()) +
                                   "; it must be a value of Activation, 0 to " +
                                   std::to_string(proto::Activation_MAX));
  }
  if (spec.compute_type() != proto::COMPUTE_FLOAT32 &&
      spec.compute_type() != proto::COMPUTE_BFLOAT16) {
    return Status::InvalidArgument("compute_type is " + std::to_string(spec.compute_type()) +
                                   "; it must be 1 (float32) or 2 (bfloat16)");
  }
  return Status::Ok();
}

DType ComputeDType(const proto::DecoderSpec& spec) {
  return spec.compute_type() == proto::COMPUTE_BFLOAT16 ? DType::kBFloat16 : DType::kFloat32;
}

Status CheckGemmDepths(const proto::DecoderSpec& spec) {
  const int64_t group = weights::kLaneBytes / weights::StoredElementBytes(ComputeDType(spec));
  const std::pair<const char*, int64_t> depths[] = {
      {"hidden_size", spec.hidden_size()},
      {"num_heads * head_dim", spec.num_heads() * spec.head_dim()},
      {"intermediate_size", spec.intermediate_size()}};
  for (const auto& [field, k] : depths) {
    if (k % group != 0) {
      return Status::InvalidArgument(std::string(field) + " is " + std::to_string(k) +
                                     "; it must be a multiple of " + std::to_string(group) +
                                     ", the pack group of the compute type");
    }
  }
  return Status::Ok();
}

// Appends to one list; a GEMM weight's shape is [out_features, in_features].
class ListBuilder {
 public:
  explicit ListBuilder(DType compute) : compute_(compute) {}

  void Gemm(std::string name, int64_t n, int64_t k) {
    list_.push_back({std::move(name), compute_, proto::PANEL64, {n, k}});
  }
  void Table(std::string name, int64_t rows, int64_t cols) {
    list_.push_back({std::move(name), compute_, proto::ROW_MAJOR, {rows, cols}});
  }
  void Vector(std::string name, int64_t size) {
    list_.push_back({std::move(name), DType::kFloat32, proto::ROW_MAJOR, {size}});
  }
  std::vector<RequiredTensor> Take() { return std::move(list_); }

 private:
  DType compute_;
  std::vector<RequiredTensor> list_;
};

void AddLayer(const proto::DecoderSpec& spec, int64_t layer, ListBuilder& list) {
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  const int64_t hidden = spec.hidden_size();
  const int64_t q_size = spec.num_heads() * spec.head_dim();
  const int64_t qkv_size = q_size + 2 * spec.num_kv_heads() * spec.head_dim();
  const int64_t inner = spec.intermediate_size();
  list.Vector(prefix + "attention_norm", hidden);
  list.Gemm(prefix + "qkv", qkv_size, hidden);
  if (spec.qkv_bias()) list.Vector(prefix + "qkv_bias", qkv_size);
  if (spec.qk_norm()) {
    list.Vector(prefix + "q_norm", spec.head_dim());
    list.Vector(prefix + "k_norm", spec.head_dim());
  }
  list.Gemm(prefix + "o", hidden, q_size);
  if (spec.o_bias()) list.Vector(prefix + "o_bias", hidden);
  list.Vector(prefix + "mlp_norm", hidden);
  list.Gemm(prefix + "gate_up", 2 * inner, hidden);
  if (spec.mlp_bias()) list.Vector(prefix + "gate_up_bias", 2 * inner);
  list.Gemm(prefix + "down", hidden, inner);
  if (spec.mlp_bias()) list.Vector(prefix + "down_bias", hidden);
}

}  // namespace

Result<std::vector<RequiredTensor>> RequiredTensors(const proto::DecoderSpec& spec) {
  AS_RETURN_IF_ERROR(CheckSizes(spec));
  AS_RETURN_IF_ERROR(CheckRopeAndWindows(spec));
  AS_RETURN_IF_ERROR(CheckFloatsAndEnums(spec));
  AS_RETURN_IF_ERROR(CheckGemmDepths(spec));
  ListBuilder list(ComputeDType(spec));
  if (spec.tie_embeddings()) {
    list.Gemm("embedding", spec.vocab_size(), spec.hidden_size());
  } else {
    list.Table("embedding", spec.vocab_size(), spec.hidden_size());
  }
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) AddLayer(spec, layer, list);
  list.Vector("final_norm", spec.hidden_size());
  if (!spec.tie_embeddings()) list.Gemm("lm_head", spec.vocab_size(), spec.hidden_size());
  if (spec.rotary_dim() > 0) list.Vector("rope.inv_freq", spec.rotary_dim() / 2);
  std::vector<RequiredTensor> tensors = list.Take();
  const Result<weights::FilePlan> plan = weights::PlanFile(tensors);
  if (!plan.ok()) return plan.status();
  return tensors;
}

}  // namespace allspark
