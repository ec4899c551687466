#include "weights/describe.h"

#include <map>
#include <sstream>
#include <string>

#include "weights/format.h"

namespace allspark {
namespace {

const char* FormName(const proto::WeightQuant& quant) {
  if (quant.float8()) return " float8";
  if (!quant.table().empty()) return " table";
  if (quant.offset()) return " offset";
  return quant.asymmetric() ? " asymmetric" : " symmetric";
}

const char* ScaleName(const proto::WeightQuant& quant) {
  if (quant.power_scales()) return ", powers of two as scales";
  if (quant.scale_codes()) return ", 8-bit scales";
  return quant.half_scales() ? ", float16 scales" : "";
}

void DescribeExperts(const proto::DecoderSpec& spec, std::ostream& out) {
  if (spec.num_experts() == 0) return;
  out << "num_experts: " << spec.num_experts()
      << "\nexperts_per_token: " << spec.experts_per_token()
      << "\nexpert_intermediate_size: " << spec.expert_intermediate_size()
      << "\nshared_intermediate_size: " << spec.shared_intermediate_size()
      << "\nshared_gate: " << spec.shared_gate()
      << "\ndense_layers: " << weights::ShapeString(spec.dense_layers())
      << "\nrouter_score: " << proto::RouterScore_Name(spec.router_score())
      << "\nrouter_bias: " << spec.router_bias()
      << "\nnormalize_expert_weights: " << spec.normalize_expert_weights()
      << "\nexpert_weight_scale: " << spec.expert_weight_scale()
      << "\nexpert_groups: " << spec.expert_groups()
      << "\nused_expert_groups: " << spec.used_expert_groups() << "\n";
}

void DescribeSpec(const proto::DecoderSpec& spec, std::ostream& out) {
  out << "architecture: " << spec.architecture() << "\nvocab_size: " << spec.vocab_size()
      << "\nhidden_size: " << spec.hidden_size() << "\nnum_layers: " << spec.num_layers()
      << "\nnum_heads: " << spec.num_heads() << "\nnum_kv_heads: " << spec.num_kv_heads()
      << "\nhead_dim: " << spec.head_dim() << "\nintermediate_size: " << spec.intermediate_size()
      << "\nnorm_eps: " << spec.norm_eps()
      << "\nactivation: " << proto::Activation_Name(spec.activation()) << std::boolalpha
      << "\ntie_embeddings: " << spec.tie_embeddings() << "\nqkv_bias: " << spec.qkv_bias()
      << "\no_bias: " << spec.o_bias() << "\nmlp_bias: " << spec.mlp_bias()
      << "\nqk_norm: " << spec.qk_norm() << "\nmax_position: " << spec.max_position()
      << "\nrotary_dim: " << spec.rotary_dim() << "\nrope_interleaved: " << spec.rope_interleaved()
      << "\nrope_attention_scaling: " << spec.rope_attention_scaling()
      << "\nattention_scale: " << spec.attention_scale()
      << "\nattention_soft_cap: " << spec.attention_soft_cap()
      << "\nembedding_scale: " << spec.embedding_scale()
      << "\nresidual_scale: " << spec.residual_scale() << "\nlogits_scale: " << spec.logits_scale()
      << "\nlogits_soft_cap: " << spec.logits_soft_cap()
      << "\nnorm_placement: " << proto::NormPlacement_Name(spec.norm_placement())
      << "\nqk_norm_whole: " << spec.qk_norm_whole() << "\nwindow_rope: " << spec.window_rope()
      << "\nnorm_kind: " << proto::NormKind_Name(spec.norm_kind())
      << "\nnorm_bias: " << spec.norm_bias() << "\nungated_mlp: " << spec.ungated_mlp()
      << "\nparallel_residual: " << spec.parallel_residual()
      << "\nshared_norm: " << spec.shared_norm()
      << "\nlearned_positions: " << spec.learned_positions()
      << "\nlm_head_bias: " << spec.lm_head_bias() << "\nembedding_norm: " << spec.embedding_norm()
      << "\nalibi: " << spec.alibi() << "\nkv_latent: " << spec.kv_latent()
      << "\nq_latent: " << spec.q_latent() << "\nvalue_dim: " << spec.value_dim()
      << "\nlatent_norm_eps: " << spec.latent_norm_eps() << "\nqkv_limit: " << spec.qkv_limit()
      << "\nlayer_window: " << weights::ShapeString(spec.layer_window())
      << "\ncompute_type: " << proto::ComputeType_Name(spec.compute_type()) << "\n";
  DescribeExperts(spec, out);
  for (const proto::WeightQuant& quant : spec.weight_quant()) {
    out << "weight_quant " << quant.tensor() << ": bits " << quant.bits() << " group_size "
        << quant.group_size() << FormName(quant) << ScaleName(quant)
        << (quant.reordered() ? ", reordered" : "")
        << (quant.quantize_activations() ? ", int8 activations" : "");
    if (quant.activation_group_size() != 0) {
      out << " in groups of " << quant.activation_group_size();
    }
    out << "\n";
  }
}

}  // namespace

std::string DescribeModel(const ModelReader& reader) {
  const proto::ModelFile& file = reader.file();
  std::ostringstream out;
  out << "source: " << reader.source() << "\nformat_version: " << file.format_version()
      << "\nfile_id: " << std::hex << file.file_id() << std::dec
      << "\nparam_bytes: " << file.param_bytes() << "\n";
  DescribeSpec(file.spec(), out);
  out << "build.version: " << file.build().version() << "\nbuild.source: " << file.build().source()
      << "\n";
  const std::map<std::string, std::string> options(file.build().options().begin(),
                                                   file.build().options().end());
  for (const auto& [key, value] : options) out << "build.options." << key << ": " << value << "\n";
  for (const proto::TensorRecord& record : file.tensors()) {
    out << "tensor " << record.name() << ": " << weights::StoredDTypeName(record.dtype()) << " "
        << weights::ShapeString(record.shape()) << " " << weights::LayoutName(record.layout())
        << " offset " << record.offset() << " bytes " << record.bytes() << " checksum " << std::hex
        << record.checksum() << std::dec << "\n";
  }
  return out.str();
}

}  // namespace allspark
