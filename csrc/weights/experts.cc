#include "weights/experts.h"

#include <algorithm>
#include <string>
#include <utility>

#include "weights/spec_check.h"

namespace allspark::weights {
namespace {

Status CheckNoExperts(const proto::DecoderSpec& spec) {
  const std::pair<const char*, bool> fields[] = {
      {"experts_per_token", spec.experts_per_token() != 0},
      {"expert_intermediate_size", spec.expert_intermediate_size() != 0},
      {"shared_intermediate_size", spec.shared_intermediate_size() != 0},
      {"shared_gate", spec.shared_gate()},
      {"dense_layers", spec.dense_layers_size() != 0},
      {"router_score", spec.router_score() != proto::ROUTER_SOFTMAX},
      {"router_bias", spec.router_bias()},
      {"normalize_expert_weights", spec.normalize_expert_weights()},
      {"expert_weight_scale", spec.expert_weight_scale() != 0.0f},
      {"expert_groups", spec.expert_groups() != 0},
      {"used_expert_groups", spec.used_expert_groups() != 0}};
  for (const auto& [field, is_set] : fields) {
    AS_RETURN_IF_ERROR(CheckUnset(field, is_set, "num_experts is 0"));
  }
  return Status::Ok();
}

Status CheckDenseLayers(const proto::DecoderSpec& spec) {
  int64_t after = -1;
  for (const int64_t layer : spec.dense_layers()) {
    if (layer <= after || layer >= spec.num_layers()) {
      return SpecError("dense_layers", ShapeString(spec.dense_layers()),
                       "ascending in [0, " + std::to_string(spec.num_layers()) + ")");
    }
    after = layer;
  }
  if (spec.dense_layers_size() == spec.num_layers()) {
    return SpecError("dense_layers", "every layer", "fewer where num_experts is not 0");
  }
  if ((spec.intermediate_size() == 0) != (spec.dense_layers_size() == 0)) {
    return SpecError("intermediate_size", std::to_string(spec.intermediate_size()),
                     "0 where every layer has experts, and only there");
  }
  return Status::Ok();
}

Status CheckGroups(const proto::DecoderSpec& spec) {
  const int64_t groups = spec.expert_groups(), used = spec.used_expert_groups();
  if (groups == 0) return CheckInt("used_expert_groups", used, 0, 0);
  AS_RETURN_IF_ERROR(
      CheckInt("expert_groups", groups, 1, std::min(kMaxExpertGroups, spec.num_experts())));
  AS_RETURN_IF_ERROR(CheckInt("used_expert_groups", used, 1, groups));
  if (spec.num_experts() % groups != 0) {
    return SpecError("expert_groups", std::to_string(groups),
                     "a divisor of num_experts, " + std::to_string(spec.num_experts()));
  }
  return CheckInt("experts_per_token", spec.experts_per_token(), 1,
                  used * (spec.num_experts() / groups));
}

}  // namespace

bool HasExperts(const proto::DecoderSpec& spec, int64_t layer) {
  return spec.num_experts() != 0 &&
         !std::binary_search(spec.dense_layers().begin(), spec.dense_layers().end(), layer);
}

Status CheckExperts(const proto::DecoderSpec& spec, int64_t max_width) {
  if (spec.num_experts() == 0) return CheckNoExperts(spec);
  AS_RETURN_IF_ERROR(CheckInt("num_experts", spec.num_experts(), 1, kMaxExperts));
  AS_RETURN_IF_ERROR(CheckInt("experts_per_token", spec.experts_per_token(), 1,
                              std::min(kMaxExpertsPerToken, spec.num_experts())));
  const int64_t inner = spec.expert_intermediate_size(), shared = spec.shared_intermediate_size();
  AS_RETURN_IF_ERROR(CheckInt("expert_intermediate_size", inner, 1, max_width));
  AS_RETURN_IF_ERROR(CheckInt("shared_intermediate_size", shared, 0, max_width));
  AS_RETURN_IF_ERROR(CheckWholePanels("expert_intermediate_size", inner, "experts"));
  AS_RETURN_IF_ERROR(CheckWholePanels("shared_intermediate_size", shared, "experts"));
  AS_RETURN_IF_ERROR(CheckWholePanels("hidden_size", spec.hidden_size(), "experts"));
  if (spec.shared_gate() && shared == 0) {
    return SpecError("shared_gate", "true", "false where shared_intermediate_size is 0");
  }
  const std::pair<const char*, bool> without[] = {{"mlp_bias", spec.mlp_bias()},
                                                  {"ungated_mlp", spec.ungated_mlp()},
                                                  {"parallel_residual", spec.parallel_residual()}};
  for (const auto& [field, is_set] : without) {
    if (is_set) return SpecError(field, "true", "false where there are experts");
  }
  AS_RETURN_IF_ERROR(CheckDenseLayers(spec));
  AS_RETURN_IF_ERROR(CheckEnum("router_score", spec.router_score(), "RouterScore",
                               proto::RouterScore_IsValid, proto::RouterScore_MAX));
  return CheckGroups(spec);
}

}  // namespace allspark::weights
