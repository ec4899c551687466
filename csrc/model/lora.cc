#include "model/lora.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/int_math.h"
#include "model/panel_matrix.h"
#include "tensor/tensor_view.h"
#include "weights/input_order.h"
#include "weights/required_tensors.h"

namespace allspark {
namespace {

// Queries, keys and values: no weight has more modules.
constexpr int64_t kMaxModules = 3;
constexpr std::string_view kLayers = "layers.";

// The weights of a layer by the names of their tensors; the shared expert is a layer's MLP.
constexpr std::pair<std::string_view, LoraWeight LoraLayer::*> kLayerWeights[] = {
    {"qkv", &LoraLayer::qkv},
    {"latents", &LoraLayer::latents},
    {"q", &LoraLayer::q},
    {"o", &LoraLayer::o},
    {"gate_up", &LoraLayer::gate_up},
    {"up", &LoraLayer::gate_up},
    {"down", &LoraLayer::down},
    {"shared_gate_up", &LoraLayer::gate_up},
    {"shared_down", &LoraLayer::down}};

// Ranks are padded with zeros to a whole lane of the packed layouts, in int8 to whole scales.
int64_t PaddedRank(int64_t rank, DType dtype) {
  return AlignUp(
      rank, dtype == DType::kInt8 ? kernels::kSumBlock : kernels::PackGroup(ElementBytes(dtype)));
}

}  // namespace

int64_t MaxLoraColumns(int64_t max_rank) {
  return kMaxModules * PaddedRank(max_rank, DType::kInt8);
}

// Packs an adapter into one allocation: counts the bytes of all targets, then fills them.
class LoraBuilder {
 public:
  LoraBuilder(const LoraFile& file, const ModelReader& model, const DecoderShape& shape,
              int64_t max_rank, std::vector<RequiredTensor> tensors)
      : file_(file),
        model_(model),
        shape_(shape),
        max_rank_(max_rank),
        tensors_(std::move(tensors)) {}

  Result<std::shared_ptr<const LoraAdapter>> Build(Device& device) {
    adapter_->layers_.resize(static_cast<size_t>(shape_.num_layers));
    AS_RETURN_IF_ERROR(TakePairs());
    int64_t bytes = 0;
    for (Target& target : targets_) bytes += TargetBytes(target);
    if (bytes == 0) return Status::InvalidArgument(file_.source() + " adapts nothing");
    AS_ASSIGN_OR_RETURN(adapter_->buffer_,
                        Buffer::Create(device.allocator(), static_cast<size_t>(bytes)));
    packed_.resize(static_cast<size_t>(bytes));
    for (Target& target : targets_) AS_RETURN_IF_ERROR(Pack(target));
    device.ops().Upload(adapter_->buffer_.data(), packed_.data(), packed_.size());
    return std::shared_ptr<const LoraAdapter>(std::move(adapter_));
  }

 private:
  // One of the decoder's weights, and the adapter's pairs for it.
  struct Target {
    std::string tensor;
    LoraWeight* weight = nullptr;
    InputFormat input;
    std::vector<int64_t> ends;  // of its modules' rows
    int64_t cols = 0;
    bool is_embedding = false;
    std::vector<const LoraPair*> pairs = {};
    // If the model has the weight's columns, or the rows of each of its modules, in another order,
    // the columns of a, or the rows of b, get that order.
    const int32_t* col_order = nullptr;
    const int32_t* row_order = nullptr;
  };

  std::string Message(const LoraPair& pair, const std::string& what) const {
    return file_.source() + ": the adapter of '" + pair.tensor + "' " + what;
  }
  Status Error(const LoraPair& pair, const std::string& what) const {
    return Status::InvalidArgument(Message(pair, what));
  }

  // The model's weight of that name; weight null: it has none that takes adapters.
  Target FindTarget(const std::string& tensor) {
    // Tied, the embedding is the head, too, as a matrix of other rows.
    const bool is_tied_head = tensor == "lm_head" && shape_.tie_embeddings;
    const std::string_view listed = is_tied_head ? "embedding" : std::string_view(tensor);
    const auto found = std::find_if(tensors_.begin(), tensors_.end(),
                                    [&](const auto& each) { return each.name == listed; });
    if (found == tensors_.end() || found->modules.empty()) return {};
    const int64_t rows = found->shape[0], cols = found->shape[1];
    const InputFormat input =
        InputFormatOf(FindWeightQuant(model_.spec(), found->name), shape_.compute);
    if (tensor == "lm_head") return {tensor, &adapter_->lm_head_, input, {rows}, cols};
    if (tensor == "embedding") {
      return {tensor, &adapter_->embedding_, shape_.compute, found->modules,
              rows,   /*is_embedding=*/true};
    }
    const std::string_view in_layer = std::string_view(tensor).substr(kLayers.size());
    const size_t dot = in_layer.find('.');
    const auto layer = static_cast<size_t>(std::stoll(std::string(in_layer.substr(0, dot))));
    const auto slot =
        std::find_if(std::begin(kLayerWeights), std::end(kLayerWeights),
                     [&](const auto& each) { return each.first == in_layer.substr(dot + 1); });
    AS_CHECK(slot != std::end(kLayerWeights))
        << tensor << " takes adapters, but LoraLayer lacks it";
    return {tensor, &(adapter_->layers_[layer].*slot->second), input, found->modules, cols};
  }

  Status FindOrders(Target& target) const {
    if (target.weight == nullptr || target.is_embedding) return Status::Ok();
    AS_ASSIGN_OR_RETURN(target.col_order, InputOrder(model_, target.tensor, target.cols));
    // The rows of gate and up are the columns of down, and have their order.
    const std::string layer = target.tensor.substr(0, target.tensor.rfind('.') + 1);
    if (target.tensor != layer + shape_.up_name()) return Status::Ok();
    AS_ASSIGN_OR_RETURN(target.row_order, InputOrder(model_, layer + "down", shape_.intermediate));
    return Status::Ok();
  }

  Status TakePairs() {
    for (const LoraPair& pair : file_.pairs()) {
      auto known = std::find_if(targets_.begin(), targets_.end(),
                                [&](const Target& t) { return t.tensor == pair.tensor; });
      if (known == targets_.end()) {
        known = targets_.insert(known, FindTarget(pair.tensor));
        AS_RETURN_IF_ERROR(FindOrders(*known));
      }
      Target& target = *known;
      if (target.weight == nullptr) {
        return Error(pair, "is for a weight that the model does not have");
      }
      AS_RETURN_IF_ERROR(CheckPair(pair, target));
      target.pairs.insert(std::upper_bound(target.pairs.begin(), target.pairs.end(), &pair,
                                           [](const LoraPair* a, const LoraPair* b) {
                                             return a->row_begin < b->row_begin;
                                           }),
                          &pair);
      adapter_->rank_ = std::max(adapter_->rank_, pair.rank);
    }
    return Status::Ok();
  }

  Status CheckPair(const LoraPair& pair, const Target& target) const {
    if (pair.cols != target.cols) {
      return Error(pair, "reads " + std::to_string(pair.cols) + " features; the model has " +
                             std::to_string(target.cols));
    }
    // A pair must cover whole modules: modules of another model may lie within these rows, too.
    const auto ends_at = [&](int64_t row) {
      return std::find(target.ends.begin(), target.ends.end(), row) != target.ends.end();
    };
    const int64_t row_end = pair.row_begin + pair.rows;
    if (target.input.dtype == DType::kInt8 && target.input.scale_group == 0 &&
        pair.cols > kMostByteSum) {
      return Status::Unimplemented(Message(
          pair, "reads " + std::to_string(pair.cols) + " int8 features with one scale; at most " +
                    std::to_string(kMostByteSum) + " are supported, or an activation_group_size"));
    }
    if (pair.rows < 1 || (pair.row_begin != 0 && !ends_at(pair.row_begin)) || !ends_at(row_end)) {
      std::string ends;
      for (const int64_t end : target.ends) {
        ends += (ends.empty() ? "" : ", ") + std::to_string(end);
      }
      return Error(pair, "has rows [" + std::to_string(pair.row_begin) + ", " +
                             std::to_string(row_end) + "); the model's modules end at " + ends);
    }
    if (pair.rank < 1 || pair.rank > max_rank_) {
      return Status(StatusCode::kInvalidArgument, AsStatus::kLoraRankExceedLimitError,
                    Message(pair, "has rank " + std::to_string(pair.rank) + "; lora_max_rank is " +
                                      std::to_string(max_rank_)));
    }
    for (const LoraPair* other : target.pairs) {
      if (pair.row_begin < other->row_begin + other->rows &&
          other->row_begin < pair.row_begin + pair.rows) {
        return Error(pair, "has row " + std::to_string(std::max(pair.row_begin, other->row_begin)) +
                               " twice");
      }
    }
    return Status::Ok();
  }

  int64_t Rank(const Target& target) const {
    int64_t rank = 0;
    for (const LoraPair* pair : target.pairs) rank += PaddedRank(pair->rank, target.input.dtype);
    return rank;
  }
  PanelMatrix A(const Target& target) const {
    return {target.input.dtype, Rank(target), target.cols, kernels::kNarrowPanelColumns,
            /*scale_group=*/target.cols};
  }
  // Of all panels that the pair's rows are in.
  PanelMatrix B(const Target& target, const LoraPair& pair) const {
    return {target.input.dtype, (PanelEnd(pair) - PanelBegin(pair)) * kernels::kPanelColumns,
            PaddedRank(pair.rank, target.input.dtype), kernels::kPanelColumns, kernels::kSumBlock};
  }
  static int64_t PanelBegin(const LoraPair& pair) {
    return pair.row_begin / kernels::kPanelColumns;
  }
  static int64_t PanelEnd(const LoraPair& pair) {
    return CeilDiv(pair.row_begin + pair.rows, kernels::kPanelColumns);
  }
  int64_t ABytes(const Target& target) const {
    if (!target.is_embedding) return A(target).bytes();
    return AlignUp(Rank(target) * target.cols * ElementBytes(target.input.dtype), kPackedAlignment);
  }
  int64_t TargetBytes(const Target& target) const {
    int64_t bytes = ABytes(target);
    for (const LoraPair* pair : target.pairs) bytes += B(target, *pair).bytes();
    return bytes;
  }

  // Bytes of the adapter: where they are packed, and where they will lie on the device.
  struct Place {
    unsigned char* packed;
    const unsigned char* on_device;
  };
  Place TakeBytes(int64_t bytes) {
    const int64_t at = std::exchange(used_, used_ + bytes);
    return {packed_.data() + at, static_cast<unsigned char*>(adapter_->buffer_.data()) + at};
  }
  static const uint16_t* ScalesOf(const Place& place, const PanelMatrix& matrix) {
    return reinterpret_cast<const uint16_t*>(place.on_device + matrix.scale_offset());
  }

  // These return whether all values are finite.
  static bool PackA(const Target& target, const LoraPair& pair, const PanelMatrix& matrix,
                    int64_t rank_begin, void* a) {
    bool finite = true;
    std::vector<float> row(static_cast<size_t>(pair.cols));
    for (int64_t r = 0; r < pair.rank; ++r) {
      const float* from = pair.a + r * pair.cols;
      for (int64_t k = 0; k < pair.cols; ++k) {
        row[static_cast<size_t>(k)] = from[target.col_order == nullptr ? k : target.col_order[k]];
      }
      finite &= matrix.PutRow(a, rank_begin + r, row.data());
    }
    return finite;
  }
  static bool PackEmbedding(const Target& target, const LoraPair& pair, int64_t rank, void* a) {
    bool finite = true;
    for (int64_t k = 0; k < pair.cols; ++k) {
      for (int64_t r = 0; r < pair.rank; ++r) {
        finite &= StoreElement(target.input.dtype, a, k * rank + r, pair.a[k * pair.rank + r]);
      }
    }
    return finite;
  }
  bool PackB(const Target& target, const LoraPair& pair, const PanelMatrix& matrix, void* b) const {
    bool finite = true;
    std::vector<float> padded(static_cast<size_t>(PaddedRank(pair.rank, target.input.dtype)));
    const int64_t first = pair.row_begin % kernels::kPanelColumns;
    for (int64_t row = 0; row < pair.rows; ++row) {
      int64_t from = row;
      if (target.row_order != nullptr) {  // Whole modules, of as many rows each.
        const int64_t of_module = row % shape_.intermediate;
        from += target.row_order[of_module] - of_module;
      }
      std::copy_n(pair.b + from * pair.rank, pair.rank, padded.begin());
      finite &= matrix.PutRow(b, first + row, padded.data());
    }
    return finite;
  }

  Status Pack(const Target& target) {
    LoraWeight& weight = *target.weight;
    const PanelMatrix a_panels = A(target);
    const Place a = TakeBytes(ABytes(target));
    weight.a = a.on_device;
    weight.dtype = target.input.dtype;
    weight.rank = Rank(target);
    weight.k = target.cols;
    const bool quantized = weight.dtype == DType::kInt8;
    if (quantized) weight.a_scale = ScalesOf(a, a_panels);
    int64_t rank_begin = 0;
    for (const LoraPair* pair : target.pairs) {
      const PanelMatrix b_panels = B(target, *pair);
      const Place b = TakeBytes(b_panels.bytes());
      const bool a_is_finite = target.is_embedding
                                   ? PackEmbedding(target, *pair, weight.rank, a.packed)
                                   : PackA(target, *pair, a_panels, rank_begin, a.packed);
      if (!PackB(target, *pair, b_panels, b.packed) || !a_is_finite) {
        return Error(*pair, "has a value that is not finite");
      }
      const int64_t rank = PaddedRank(pair->rank, weight.dtype);
      weight.parts.push_back({PanelBegin(*pair), PanelEnd(*pair), rank_begin, rank, b.on_device,
                              quantized ? ScalesOf(b, b_panels) : nullptr});
      rank_begin += rank;
    }
    return Status::Ok();
  }

  const LoraFile& file_;
  const ModelReader& model_;
  const DecoderShape& shape_;
  const int64_t max_rank_;
  const std::vector<RequiredTensor> tensors_;
  std::shared_ptr<LoraAdapter> adapter_ = std::make_shared<LoraAdapter>();
  std::vector<Target> targets_;
  std::vector<unsigned char> packed_;
  int64_t used_ = 0;  // bytes of it
};

Result<std::shared_ptr<const LoraAdapter>> LoraAdapter::Create(const LoraFile& file,
                                                               const ModelReader& model,
                                                               const DecoderShape& shape,
                                                               int64_t max_rank, Device& device) {
  const DeviceOps& ops = device.ops();
  if (shape.int8_activations && !ops.Has(OpKind::kLowRank, DType::kInt8)) {
    return Status::Unimplemented("kernel table '" + std::string(ops.name()) +
                                 "' has no low_rank of int8, which adapters need");
  }
  if (!ops.Has(OpKind::kLowRank, shape.compute) ||
      (shape.compute != DType::kFloat32 &&
       !ops.Has(OpKind::kConvert, DType::kFloat32, shape.compute))) {
    return Status::Unimplemented("kernel table '" + std::string(ops.name()) +
                                 "' has no low_rank or no convert to " + DTypeName(shape.compute) +
                                 ", which adapters need");
  }
  AS_ASSIGN_OR_RETURN(std::vector<RequiredTensor> tensors, RequiredTensors(model.spec()));
  return LoraBuilder(file, model, shape, max_rank, std::move(tensors)).Build(device);
}

LoraBatch::LoraBatch(int64_t max_tokens) {
  ranges_.reserve(static_cast<size_t>(max_tokens));
  rows_.reserve(static_cast<size_t>(max_tokens));
  low_rank_.reserve(static_cast<size_t>(max_tokens * kMaxModules));
}

void LoraBatch::Take(const Batch& batch) {
  ranges_.clear();
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const BatchSequence& sequence = batch.sequences[s];
    if (sequence.lora == nullptr) continue;
    // Contiguous sequences of one adapter are one range: its weights are read once for all of them.
    if (!ranges_.empty() && ranges_.back().adapter == sequence.lora &&
        ranges_.back().token_begin + ranges_.back().num_tokens == sequence.token_begin) {
      ranges_.back().num_tokens += sequence.num_tokens;
    } else {
      ranges_.push_back({sequence.token_begin, sequence.num_tokens, sequence.lora});
    }
  }
}

void LoraBatch::Add(int64_t row_begin, int64_t num_rows, const LoraWeight& weight) {
  if (weight.rank == 0) return;
  if (!rows_.empty() && rows_.back().weight == &weight &&
      rows_.back().row_begin + rows_.back().num_rows == row_begin) {
    rows_.back().num_rows += num_rows;
  } else {
    rows_.push_back({row_begin, num_rows, &weight});
  }
}

std::span<const kernels::LowRank> LoraBatch::Layer(const OpContext& context, const ConstMatrix& x,
                                                   int64_t layer, LoraWeight LoraLayer::*weight,
                                                   const LoraScratch& scratch) {
  rows_.clear();
  for (const Range& range : ranges_) {
    Add(range.token_begin, range.num_tokens, range.adapter->layer(layer).*weight);
  }
  ShrinkLora(context, x, rows_, scratch, low_rank_);
  return low_rank_;
}

std::span<const kernels::LowRank> LoraBatch::LmHead(const OpContext& context, const ConstMatrix& x,
                                                    const int64_t* tokens,
                                                    const LoraScratch& scratch) {
  rows_.clear();
  for (int64_t i = 0; i < x.rows && !ranges_.empty(); ++i) {
    const auto after = std::upper_bound(
        ranges_.begin(), ranges_.end(), tokens[i],
        [](int64_t token, const Range& range) { return token < range.token_begin; });
    if (after == ranges_.begin()) continue;
    const Range& range = *(after - 1);
    if (tokens[i] < range.token_begin + range.num_tokens) Add(i, 1, range.adapter->lm_head());
  }
  ShrinkLora(context, x, rows_, scratch, low_rank_);
  return low_rank_;
}

void LoraBatch::AddEmbedding(const OpContext& context, const int32_t* ids, int64_t token_begin,
                             const LoraScratch& scratch, const Matrix& out) {
  rows_.clear();
  for (const Range& range : ranges_) {
    const int64_t begin = std::max(range.token_begin, token_begin);
    const int64_t end = std::min(range.token_begin + range.num_tokens, token_begin + out.rows);
    if (begin < end) Add(begin - token_begin, end - begin, range.adapter->embedding());
  }
  AddLoraEmbedding(context, ids, rows_, scratch, out);
}

}  // namespace allspark
