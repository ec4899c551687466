#include "weights/latents.h"

#include <string>
#include <utility>

#include "weights/spec_check.h"

namespace allspark::weights {

Status CheckLatents(const proto::DecoderSpec& spec, int64_t max_dim, int64_t max_width) {
  if (spec.kv_latent() == 0) {
    AS_RETURN_IF_ERROR(CheckInt("q_latent", spec.q_latent(), 0, 0));
    AS_RETURN_IF_ERROR(
        CheckUnset("latent_norm_eps", spec.latent_norm_eps() != 0.0f, "kv_latent is 0"));
    return CheckInt("value_dim", spec.value_dim(), 0, 0);
  }
  AS_RETURN_IF_ERROR(CheckInt("kv_latent", spec.kv_latent(), 1, max_dim - spec.rotary_dim()));
  AS_RETURN_IF_ERROR(CheckWholePanels("kv_latent", spec.kv_latent(), "latents"));
  AS_RETURN_IF_ERROR(CheckInt("value_dim", spec.value_dim(), 1, max_dim));
  AS_RETURN_IF_ERROR(CheckWholePanels("value_dim", spec.value_dim(), "latents"));
  AS_RETURN_IF_ERROR(CheckInt("q_latent", spec.q_latent(), 0, max_width));
  // The cache keeps one head per token; the heads of keys and values are computed from it.
  AS_RETURN_IF_ERROR(CheckInt("num_kv_heads", spec.num_kv_heads(), 1, 1));
  AS_RETURN_IF_ERROR(CheckInt("rotary_dim", spec.rotary_dim(), 1, spec.head_dim() - 1));
  const std::pair<const char*, int64_t> widths[] = {
      {"num_heads * (kv_latent + rotary_dim)",
       spec.num_heads() * (spec.kv_latent() + spec.rotary_dim())},
      {"num_heads * value_dim", spec.num_heads() * spec.value_dim()}};
  for (const auto& [field, width] : widths) {
    AS_RETURN_IF_ERROR(CheckInt(field, width, 1, max_width));
  }
  const std::pair<const char*, bool> without[] = {{"qkv_bias", spec.qkv_bias()},
                                                  {"qk_norm", spec.qk_norm()},
                                                  {"alibi", spec.alibi()},
                                                  {"qkv_limit", spec.qkv_limit() != 0.0f}};
  for (const auto& [field, is_set] : without) {
    AS_RETURN_IF_ERROR(CheckUnset(field, is_set, "kv_latent is not 0"));
  }
  return Status::Ok();
}

}  // namespace allspark::weights
