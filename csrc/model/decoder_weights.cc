#include "model/decoder_weights.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/int_math.h"
#include "tensor/tensor_view.h"
#include "weights/input_order.h"

namespace allspark {
namespace {

std::string ShapeText(const int64_t* shape, int64_t rank) {
  std::string text = "[";
  for (int64_t i = 0; i < rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string Describe(DType dtype, proto::Layout layout, const int64_t* shape, int64_t rank) {
  return std::string(DTypeName(dtype)) + " " + ShapeText(shape, rank) +
         (layout == proto::PANEL64         ? " PANEL64"
          : layout == proto::PANEL64_SCALE ? " PANEL64_SCALE"
                                           : " ROW_MAJOR");
}

int64_t StoredBytes(const RequiredTensor& tensor) {
  int64_t elements = 1;
  for (const int64_t dim : tensor.shape) elements *= dim;
  if (tensor.layout != proto::ROW_MAJOR) {
    elements = AlignUp(tensor.shape[0], kernels::kPanelColumns) * tensor.shape[1];
  }
  return PackedBytes(tensor.dtype, elements);
}

Status CheckView(const RequiredTensor& expected, const WeightView& view,
                 const std::string& source) {
  const int64_t rank = static_cast<int64_t>(expected.shape.size());
  const bool same = view.data != nullptr && view.dtype == expected.dtype &&
                    view.layout == expected.layout && view.rank == rank &&
                    std::equal(expected.shape.begin(), expected.shape.end(), view.shape);
  const std::string want = Describe(expected.dtype, expected.layout, expected.shape.data(), rank);
  if (!same) {
    const int64_t shown_rank = std::clamp<int64_t>(view.rank, 0, 4);
    return Status::DataLoss(source + ": tensor '" + expected.name + "' is " +
                            Describe(view.dtype, view.layout, view.shape, shown_rank) +
                            "; the model's spec requires " + want);
  }
  if (view.bytes != StoredBytes(expected)) {
    return Status::DataLoss(source + ": tensor '" + expected.name + "' takes " +
                            std::to_string(view.bytes) + " bytes; " + want + " takes " +
                            std::to_string(StoredBytes(expected)));
  }
  return Status::Ok();
}

Status CheckTensors(const ModelReader& reader) {
  auto required = RequiredTensors(reader.spec());
  if (!required.ok()) return required.status();
  for (const RequiredTensor& tensor : *required) {
    Result<WeightView> view = reader.Find(tensor.name);
    if (!view.ok()) {
      return Status::DataLoss(reader.source() + ": tensor '" + tensor.name +
                              "' is missing; the model's spec requires it");
    }
    AS_RETURN_IF_ERROR(CheckView(tensor, *view, reader.source()));
  }
  for (const proto::WeightQuant& quant : reader.spec().weight_quant()) {
    if (!quant.reordered()) continue;
    Result<WeightView> view = reader.Find(quant.tensor());
    AS_CHECK(view.ok()) << view.status().ToString();
    AS_RETURN_IF_ERROR(InputOrder(reader, quant.tensor(), view->shape[1]).status());
  }
  return Status::Ok();
}

// Looks up tensors that CheckTensors has seen. The shapes asked for here must be those of the
// required list: a disagreement is a bug in one of the two, not in the file.
class Binder {
 public:
  Binder(const ModelReader& reader, DType compute, PlacedWeights& placed)
      : reader_(reader), compute_(compute), placed_(placed) {}

  const float* Vector(const std::string& name, int64_t size) const {
    return static_cast<const float*>(Find(name, size, 0).data);
  }
  // Where the host reads it.
  const float* OnHost(const std::string& name, int64_t size) const {
    return static_cast<const float*>(Look(name, size, 0).data);
  }
  LinearWeight Linear(Op op, const std::string& name, int64_t n, int64_t k, bool has_bias) const {
    const WeightView view = Find(name, n, k);
    AS_CHECK(view.layout == proto::PANEL64) << "tensor '" << name << "' is not packed";
    const proto::WeightQuant* quant = FindWeightQuant(reader_.spec(), name);
    return {view.data,
            view.dtype,
            n,
            k,
            has_bias ? Vector(name + "_bias", n) : nullptr,
            Scales(name, n, k),
            quant == nullptr ? InputFormat(compute_) : ActivationFormat(*quant, compute_),
            op,
            Order(name, k)};
  }
  // A norm of the residual stream: as long as a row of it.
  NormWeight Norm(const std::string& name, const DecoderShape& shape) const {
    return {Vector(name, shape.hidden), shape.norm_eps, shape.layer_norm,
            shape.norm_bias ? Vector(name + "_bias", shape.hidden) : nullptr};
  }
  EmbeddingWeight Embedding(const std::string& name, int64_t vocab, int64_t cols) const {
    const WeightView view = Find(name, vocab, cols);
    return {view.data,
            view.dtype,
            vocab,
            cols,
            view.layout == proto::PANEL64,
            Scales(name, vocab, cols)};
  }

 private:
  // The order of the weight's input features, or null. CheckTensors has seen that it is valid.
  const int32_t* Order(const std::string& name, int64_t k) const {
    Result<const int32_t*> order = InputOrder(reader_, name, k);
    AS_CHECK(order.ok()) << order.status().ToString();
    return placed_.Place(*order, k);
  }
  WeightScales Scales(const std::string& name, int64_t n, int64_t k) const {
    const proto::WeightQuant* quant = FindWeightQuant(reader_.spec(), name);
    if (quant == nullptr) return {};
    const int64_t group_size = quant->group_size() == 0 ? k : quant->group_size();
    const int64_t groups = k / group_size;
    WeightScales scales;
    const auto find = [&](const std::string& part, int64_t cols) {
      return Find(part, n, cols).data;
    };
    scales.scale = static_cast<const uint16_t*>(find(weights::ScaleName(name), groups));
    scales.half = quant->half_scales();
    if (quant->asymmetric()) {
      scales.zero = static_cast<const uint8_t*>(find(weights::ZeroName(name), groups));
    }
    if (quant->offset()) {
      scales.offset = static_cast<const uint16_t*>(find(weights::OffsetName(name), groups));
    }
    if (quant->bits() == 6) {
      scales.high = static_cast<const unsigned char*>(find(weights::HighName(name), k));
    }
    if (!quant->table().empty()) {
      scales.table = placed_.Place(reinterpret_cast<const int8_t*>(quant->table().data()),
                                   static_cast<int64_t>(quant->table().size()));
    }
    scales.group_size = group_size;
    return scales;
  }
  WeightView Find(const std::string& name, int64_t rows, int64_t cols) const {
    WeightView view = Look(name, rows, cols);
    view.data = placed_.PlaceBytes(view.data, view.bytes);
    return view;
  }
  WeightView Look(const std::string& name, int64_t rows, int64_t cols) const {
    Result<WeightView> view = reader_.Find(name);
    AS_CHECK(view.ok()) << view.status().ToString();
    AS_CHECK(view->shape[0] == rows && (cols == 0 || view->shape[1] == cols))
        << "tensor '" << name << "' is " << ShapeText(view->shape, view->rank)
        << "; the decoder reads [" << rows << ", " << cols << "]";
    return *view;
  }

  const ModelReader& reader_;
  const DType compute_;
  PlacedWeights& placed_;
};

MoeWeights BindExperts(const Binder& binder, const DecoderShape& shape,
                       const proto::DecoderSpec& spec, const std::string& prefix) {
  const int64_t experts = shape.router.num_experts, hidden = shape.hidden;
  const int64_t inner = shape.expert_intermediate, shared = shape.shared_intermediate;
  const auto linear = [&](Op op, const char* name, int64_t n, int64_t k) {
    return binder.Linear(op, prefix + name, n, k, /*has_bias=*/false);
  };
  MoeWeights moe;
  moe.router = linear(Op::kRouter, "router", shape.router.logits(), hidden);
  if (spec.router_bias()) moe.router_bias = binder.Vector(prefix + "router_bias", experts);
  moe.gate_up = linear(Op::kExpertsGateUp, "experts_gate_up", experts * 2 * inner, hidden);
  moe.down = linear(Op::kExpertsDown, "experts_down", experts * hidden, inner);
  if (shared > 0) {
    moe.shared_gate_up = linear(Op::kExpertsGateUp, "shared_gate_up", 2 * shared, hidden);
    moe.shared_down = linear(Op::kExpertsDown, "shared_down", hidden, shared);
  }
  moe.activation = shape.activation;
  return moe;
}

LatentWeights BindLatents(const Binder& binder, const DecoderShape& shape,
                          const proto::DecoderSpec& spec, const std::string& prefix) {
  const auto linear = [&](Op op, const char* name, int64_t n, int64_t k) {
    return binder.Linear(op, prefix + name, n, k, /*has_bias=*/false);
  };
  const auto norm = [&](const char* name, int64_t size) {
    return NormWeight{size > 0 ? binder.Vector(prefix + name, size) : nullptr,
                      spec.latent_norm_eps()};
  };
  LatentWeights weights;
  weights.latents = linear(Op::kLatents, "latents", shape.latent_cols(), shape.hidden);
  weights.q_norm = norm("q_latent_norm", shape.q_latent);
  weights.kv_norm = norm("kv_latent_norm", shape.kv_latent);
  weights.q = linear(Op::kQ, "q", shape.q_heads * shape.query_dim,
                     shape.q_latent > 0 ? shape.q_latent : shape.hidden);
  weights.k_up = linear(Op::kKUp, "k_up", shape.q_heads * shape.kv_latent, shape.unrotated_dim());
  weights.v_up = linear(Op::kVUp, "v_up", shape.o_cols(), shape.kv_latent);
  return weights;
}

LayerWeights BindLayer(const Binder& binder, const DecoderShape& shape,
                       const proto::DecoderSpec& spec, int64_t layer) {
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  LayerWeights weights;
  AttentionWeights& attention = weights.attention;
  const auto norm = [&](const char* name, bool has) {
    return has ? binder.Norm(prefix + name, shape) : NormWeight{};
  };
  const auto head_norm = [&](const char* name, int64_t size) {
    return NormWeight{shape.qk_norm ? binder.Vector(prefix + name, size) : nullptr, shape.norm_eps};
  };
  attention.norm = norm("attention_norm", shape.norm_before);
  if (shape.has_latents()) {
    attention.latent = BindLatents(binder, shape, spec, prefix);
  } else {
    attention.qkv =
        binder.Linear(Op::kQkv, prefix + "qkv", shape.qkv_cols(), shape.hidden, spec.qkv_bias());
  }
  const bool whole = shape.qk_norm_whole;
  attention.q_norm = head_norm("q_norm", whole ? shape.q_cols() : shape.head_dim);
  attention.k_norm = head_norm("k_norm", whole ? shape.kv_cols() : shape.head_dim);
  attention.o = binder.Linear(Op::kO, prefix + "o", shape.hidden, shape.o_cols(), spec.o_bias());
  attention.post_norm = norm("attention_post_norm", shape.norm_after);
  if (spec.layer_window_size() > 0) {
    attention.window = spec.layer_window(static_cast<int>(layer));
  }
  const NormWeight mlp_norm =
      shape.shared_norm ? attention.norm : norm("mlp_norm", shape.norm_before);
  const NormWeight mlp_post_norm = norm("mlp_post_norm", shape.norm_after);
  if (shape.layer_has_experts(layer)) {
    weights.moe = BindExperts(binder, shape, spec, prefix);
    weights.moe.norm = mlp_norm;
    weights.moe.post_norm = mlp_post_norm;
    return weights;
  }
  MlpWeights& mlp = weights.mlp;
  mlp.norm = mlp_norm;
  mlp.gate_up = binder.Linear(Op::kGateUp, prefix + shape.up_name(), shape.up_cols(), shape.hidden,
                              spec.mlp_bias());
  mlp.down =
      binder.Linear(Op::kDown, prefix + "down", shape.hidden, shape.intermediate, spec.mlp_bias());
  mlp.down.order = nullptr;  // The rows of gate and up have that order.
  mlp.post_norm = mlp_post_norm;
  mlp.activation = shape.activation;
  mlp.gated = shape.gated_mlp;
  return weights;
}

}  // namespace

Result<DecoderWeights> BindWeights(const ModelReader& reader, const DecoderShape& shape,
                                   PlacedWeights& placed) {
  AS_RETURN_IF_ERROR(CheckTensors(reader));
  const Binder binder(reader, shape.compute, placed);
  const proto::DecoderSpec& spec = reader.spec();
  DecoderWeights weights;
  weights.embedding = binder.Embedding("embedding", shape.vocab_size, shape.hidden);
  weights.layers.reserve(static_cast<size_t>(shape.num_layers));
  for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
    weights.layers.push_back(BindLayer(binder, shape, spec, layer));
  }
  weights.final_norm = binder.Norm("final_norm", shape);
  weights.lm_head = binder.Linear(Op::kLmHead, shape.tie_embeddings ? "embedding" : "lm_head",
                                  shape.vocab_size, shape.hidden, false);
  if (spec.lm_head_bias()) weights.lm_head.bias = binder.Vector("lm_head_bias", shape.vocab_size);
  if (shape.learned_positions > 0) {
    weights.position_embedding =
        binder.Embedding("position_embedding", shape.learned_positions, shape.hidden);
  }
  if (shape.embedding_norm) weights.embedding_norm = binder.Norm("embedding_norm", shape);
  if (shape.alibi) weights.alibi_slopes = binder.Vector("alibi.slopes", shape.q_heads);
  if (shape.rotary_dim > 0) {
    weights.rope_inv_freq = binder.OnHost("rope.inv_freq", shape.rotary_dim / 2);
  }
  if (shape.window_rope) {
    weights.rope_window_inv_freq = binder.OnHost("rope.window_inv_freq", shape.rotary_dim / 2);
  }
  AS_RETURN_IF_ERROR(placed.status());
  return weights;
}

}  // namespace allspark
