#include "model/decoder_weights.h"

#include <string>

#include "base/check.h"
#include "weights/input_order.h"
#include "weights/required_tensors.h"

namespace allspark {
namespace {

// Checks the orders of columns, which the reader has not looked at, so that binding cannot fail.
Status CheckOrders(const ModelReader& reader) {
  for (const proto::WeightQuant& quant : reader.spec().weight_quant()) {
    if (!quant.reordered()) continue;
    AS_ASSIGN_OR_RETURN(const WeightView view, reader.Find(quant.tensor()));
    AS_RETURN_IF_ERROR(InputOrder(reader, quant.tensor(), view.shape[1]).status());
  }
  return Status::Ok();
}

// Makes the structs of weights from the tensors' names. Shapes, biases and scales follow from the
// reader's views; a struct without data stands for a tensor that the model does not have.
class Binder {
 public:
  Binder(const ModelReader& reader, DType compute, PlacedWeights& placed)
      : reader_(reader), compute_(compute), placed_(placed) {}

  const float* Vector(const std::string& name) const {
    return Has(name) ? static_cast<const float*>(Find(name).data) : nullptr;
  }
  // Where the host reads it.
  const float* OnHost(const std::string& name) const {
    return Has(name) ? static_cast<const float*>(Look(name).data) : nullptr;
  }
  LinearWeight Linear(Op op, const std::string& name, bool gated = false) const {
    if (!Has(name)) return {};
    const int pieces = gated ? 2 : 1;  // gate and up
    const WeightView view = Find(name, pieces);
    AS_CHECK(view.layout == proto::PANEL64) << "tensor '" << name << "' is not packed";
    const proto::WeightQuant* quant = FindWeightQuant(reader_.spec(), name);
    const int64_t n = view.shape[0], k = view.shape[1];
    return {view.data,
            view.dtype,
            n,
            k,
            Vector(name + "_bias"),
            Scales(quant, name, k, pieces),
            InputFormatOf(quant, compute_),
            op,
            Order(name, k)};
  }
  // A norm of the residual stream.
  NormWeight Norm(const std::string& name, const DecoderShape& shape) const {
    if (!Has(name)) return {};
    return {Vector(name), shape.norm_eps, shape.layer_norm, Vector(name + "_bias")};
  }
  EmbeddingWeight Embedding(const std::string& name) const {
    if (!Has(name)) return {};
    const WeightView view = Find(name);
    const int64_t cols = view.shape[1];
    return {view.data, view.dtype, cols, /*packed=*/view.layout == proto::PANEL64,
            Scales(FindWeightQuant(reader_.spec(), name), name, cols)};
  }

 private:
  bool Has(const std::string& name) const { return reader_.Find(name).ok(); }
  // The order of the weight's input features, or null. CheckOrders has seen that it is valid.
  const int32_t* Order(const std::string& name, int64_t k) const {
    Result<const int32_t*> order = InputOrder(reader_, name, k);
    AS_CHECK(order.ok()) << order.status().ToString();
    return placed_.Place(*order, k);
  }
  static kernels::ScaleType TypeOf(const proto::WeightQuant& quant) {
    if (quant.power_scales()) return kernels::ScaleType::kPower;
    if (quant.scale_codes()) return kernels::ScaleType::kCode;
    return quant.half_scales() ? kernels::ScaleType::kFloat16 : kernels::ScaleType::kBFloat16;
  }
  WeightScales Scales(const proto::WeightQuant* quant, const std::string& name, int64_t k,
                      int pieces = 1) const {
    if (quant == nullptr) return {};
    WeightScales scales;
    const auto find = [&](const std::string& part) -> const void* {
      return Has(part) ? Find(part, pieces).data : nullptr;
    };
    const auto blocks = [&](const std::string& part) {
      return static_cast<const uint16_t*>(find(part));
    };
    scales.scale = find(weights::ScaleName(name));
    scales.offset = find(weights::OffsetName(name));
    scales.block_scale = blocks(weights::BlockScaleName(name));
    scales.block_offset = blocks(weights::BlockOffsetName(name));
    scales.type = TypeOf(*quant);
    scales.zero = static_cast<const uint8_t*>(find(weights::ZeroName(name)));
    scales.high = static_cast<const unsigned char*>(find(weights::HighName(name)));
    if (!quant->table().empty()) {
      scales.table = placed_.Place(reinterpret_cast<const int8_t*>(quant->table().data()),
                                   static_cast<int64_t>(quant->table().size()));
    }
    scales.group_size = quant->group_size() == 0 ? k : quant->group_size();
    return scales;
  }
  WeightView Find(const std::string& name, int pieces = 1) const {
    WeightView view = Look(name);
    view.data = placed_.PlaceBytes(view.data, view.bytes, pieces);
    return view;
  }
  WeightView Look(const std::string& name) const {
    Result<WeightView> view = reader_.Find(name);
    AS_CHECK(view.ok()) << view.status().ToString();
    return *view;
  }

  const ModelReader& reader_;
  const DType compute_;
  PlacedWeights& placed_;
};

MoeWeights BindExperts(const Binder& binder, const std::string& prefix) {
  const auto linear = [&](Op op, const char* name) { return binder.Linear(op, prefix + name); };
  MoeWeights moe;
  moe.router = linear(Op::kRouter, "router");
  moe.router_bias = binder.Vector(prefix + "router_bias");
  // Not what is added to a product, but to scores (ops/moe.h).
  moe.router.bias = nullptr;
  moe.gate_up = linear(Op::kExpertsGateUp, "experts_gate_up");
  moe.down = linear(Op::kExpertsDown, "experts_down");
  moe.shared_gate_up = linear(Op::kExpertsGateUp, "shared_gate_up");
  moe.shared_down = linear(Op::kExpertsDown, "shared_down");
  return moe;
}

LatentWeights BindLatents(const Binder& binder, float norm_eps, const std::string& prefix) {
  const auto linear = [&](Op op, const char* name) { return binder.Linear(op, prefix + name); };
  LatentWeights weights;
  weights.latents = linear(Op::kLatents, "latents");
  weights.q_norm = {binder.Vector(prefix + "q_latent_norm"), norm_eps};
  weights.kv_norm = {binder.Vector(prefix + "kv_latent_norm"), norm_eps};
  weights.q = linear(Op::kQ, "q");
  weights.k_up = linear(Op::kKUp, "k_up");
  weights.v_up = linear(Op::kVUp, "v_up");
  return weights;
}

LayerWeights BindLayer(const Binder& binder, const DecoderShape& shape,
                       const proto::DecoderSpec& spec, int64_t layer) {
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  const auto norm = [&](const char* name) { return binder.Norm(prefix + name, shape); };
  LayerWeights weights;
  AttentionWeights& attention = weights.attention;
  attention.norm = norm("attention_norm");
  attention.qkv = binder.Linear(Op::kQkv, prefix + "qkv");
  if (shape.has_latents()) {
    attention.latent = BindLatents(binder, spec.latent_norm_eps(), prefix);
  }
  attention.q_norm = {binder.Vector(prefix + "q_norm"), shape.norm_eps};
  attention.k_norm = {binder.Vector(prefix + "k_norm"), shape.norm_eps};
  attention.o = binder.Linear(Op::kO, prefix + "o");
  attention.post_norm = norm("attention_post_norm");
  if (spec.layer_window_size() > 0) {
    attention.window = spec.layer_window(static_cast<int>(layer));
  }
  weights.mlp_norm = shape.shared_norm ? attention.norm : norm("mlp_norm");
  weights.mlp.gate_up = binder.Linear(Op::kGateUp, prefix + shape.up_name(), shape.gated_mlp);
  weights.mlp.down = binder.Linear(Op::kDown, prefix + "down");
  weights.mlp.down.order = nullptr;  // The rows of gate and up have that order.
  weights.moe = BindExperts(binder, prefix);
  weights.mlp_post_norm = norm("mlp_post_norm");
  return weights;
}

}  // namespace

Result<DecoderWeights> BindWeights(const ModelReader& reader, const DecoderShape& shape,
                                   PlacedWeights& placed) {
  AS_RETURN_IF_ERROR(CheckOrders(reader));
  const Binder binder(reader, shape.compute, placed);
  DecoderWeights weights;
  weights.embedding = binder.Embedding("embedding");
  weights.layers.reserve(static_cast<size_t>(shape.num_layers));
  for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
    weights.layers.push_back(BindLayer(binder, shape, reader.spec(), layer));
  }
  weights.final_norm = binder.Norm("final_norm", shape);
  weights.lm_head = binder.Linear(Op::kLmHead, shape.tie_embeddings ? "embedding" : "lm_head");
  weights.lm_head.bias = binder.Vector("lm_head_bias");
  weights.position_embedding = binder.Embedding("position_embedding");
  weights.embedding_norm = binder.Norm("embedding_norm", shape);
  weights.alibi_slopes = binder.Vector("alibi.slopes");
  weights.rope_inv_freq = binder.OnHost("rope.inv_freq");
  weights.rope_window_inv_freq = binder.OnHost("rope.window_inv_freq");
  AS_RETURN_IF_ERROR(placed.status());
  return weights;
}

}  // namespace allspark
