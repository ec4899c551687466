#include "model/decoder.h"

#include <algorithm>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/int_math.h"
#include "model/attention.h"
#include "model/context_extension.h"
#include "model/decoder_shape.h"
#include "model/decoder_weights.h"
#include "model/lora.h"
#include "model/mlp.h"
#include "model/moe.h"
#include "model/residual.h"
#include "model/rope_table.h"
#include "model/step_image.h"
#include "model/workspace.h"
#include "ops/norm.h"
#include "ops/scale.h"

namespace allspark {
namespace {

WorkspaceSize SizeFor(int64_t tokens, const DecoderOptions& options) {
  return {tokens, options.max_length,
          options.lora_max_rank > 0 ? MaxLoraColumns(options.lora_max_rank) : 0};
}

Status CheckOption(const char* name, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return Status::Ok();
  return Status::InvalidArgument(std::string(name) + " is " + std::to_string(value) +
                                 "; it must be in [" + std::to_string(min) + ", " +
                                 std::to_string(max) + "]");
}

// InvalidArgument naming the option, the value and the bound.
Status CheckOptions(const DecoderOptions& options) {
  AS_RETURN_IF_ERROR(CheckOption("max_length", options.max_length, 1, kMaxPositions));
  AS_RETURN_IF_ERROR(CheckOption("max_tokens", options.max_tokens, 1, kMaxPositions));
  AS_RETURN_IF_ERROR(CheckOption("max_logits_rows", options.max_logits_rows, 1, kMaxPositions));
  if (options.rope_scaling_factor != 0 && !(options.rope_scaling_factor >= 1)) {
    return Status::InvalidArgument("rope_scaling_factor is " +
                                   std::to_string(options.rope_scaling_factor) +
                                   "; it must be 0 (off), or 1 or more");
  }
  const int64_t block_size = options.block_size;
  if (block_size != 16 && block_size != 32 && block_size != 64 && block_size != 128) {
    return Status::InvalidArgument("block_size is " + std::to_string(block_size) +
                                   "; it must be 16, 32, 64 or 128");
  }
  return Status::Ok();
}

// Bytes of the largest step's integers: tokens, positions, sequences with a block table each, and
// rows of logits. Every Put may lose some by alignment: four of a batch, and one for each table and
// each call of Logits, which has a token or more.
int64_t ImageBytes(const DecoderOptions& options) {
  const int64_t tokens = options.max_tokens;
  const int64_t tables = tokens * CeilDiv(options.max_length, options.block_size);
  const auto bytes = [](int64_t count, size_t of_each) {
    return count * static_cast<int64_t>(of_each);
  };
  return bytes(2 * tokens + tables, sizeof(int32_t)) + bytes(tokens, sizeof(SequenceRange)) +
         bytes(options.max_logits_rows + tokens, sizeof(int64_t)) +
         (4 + 2 * tokens) * StepImage::kAlignment;
}

KvShape KvShapeOf(const DecoderShape& shape, const DecoderOptions& options) {
  return {.dtype = shape.cache,
          .num_layers = shape.num_layers,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .block_size = options.block_size};
}

DecoderBytes BytesOf(const DecoderShape& shape, const DecoderOptions& options,
                     const Device& device) {
  const WorkspaceSize largest = SizeFor(options.max_tokens, options);
  return {.block = device.KvBlockBytes(KvShapeOf(shape, options)),
          .arena = WorkspaceBytes(shape, largest, device.ops()),
          .tables = (shape.window_rope ? 2 : 1) * RopeTable::Bytes(shape, options.max_length),
          .image = device.has_own_memory() ? ImageBytes(options) : 0};
}

struct DecoderParts {
  explicit DecoderParts(Device& device) : placed(device) {}

  DecoderShape shape;
  DecoderOptions options;
  PlacedWeights placed;
  DecoderWeights weights;
  RopeTable rope;
  RopeTable window_rope;  // empty: rope
};

class DecoderImpl final : public Decoder {
 public:
  DecoderImpl(DecoderParts parts, StepImage image, Device& device)
      : parts_(std::move(parts)),
        device_(device),
        kv_shape_(KvShapeOf(parts_.shape, parts_.options)),
        bytes_(BytesOf(parts_.shape, parts_.options, device)),
        image_(std::move(image)),
        lora_(parts_.options.lora_max_rank > 0 ? parts_.options.max_tokens : 0),
        sequences_(static_cast<size_t>(parts_.options.max_tokens)),
        logits_tokens_(static_cast<size_t>(parts_.options.max_logits_rows)) {
    tasks_.reserve(static_cast<size_t>(parts_.shape.q_heads));
  }

  int64_t vocab_size() const override { return parts_.shape.vocab_size; }
  int64_t hidden_size() const override { return parts_.shape.hidden; }
  const KvShape& kv_shape() const override { return kv_shape_; }
  int64_t arena_bytes() const override { return bytes_.arena; }
  void Forward(const Batch& batch, const KvPool& kv, StepArena& arena, float* logits) override;
  void ForwardLayers(const Batch& batch, const KvPool& kv, StepArena& arena, const float* in,
                     float* out) override;
  void Logits(const int64_t* tokens, int64_t num_tokens, float* logits) override;
  void HiddenStates(int64_t token_begin, int64_t num_tokens, float* hidden) override;
  void InputEmbeddings(int64_t token_begin, int64_t num_tokens, float* embeddings) override;

 private:
  void CheckBatch(const Batch& batch, const KvPool& kv) const;
  void CheckSequence(const Batch& batch, const KvPool& kv, int64_t index) const;
  // Hands the batch's integers over to the device.
  void TakeBatch(const Batch& batch);
  void CheckTokens(int64_t token_begin, int64_t num_tokens) const;
  // logits, as Logits; row_ids are the same tokens on the device.
  void LogitsOf(const int64_t* tokens, const int64_t* row_ids, int64_t num_tokens, float* logits);
  // The residual stream before the first layer, from the batch's tokens or from `in`, and what the
  // layers make of it, in the workspace.
  void RunLayers(const Batch& batch, const KvPool& kv, StepArena& arena, const float* in);
  void Embed(int64_t token_begin, const Matrix& out);
  size_t StreamBytes(const Batch& batch) const;  // of the batch's rows of the residual stream

  const DecoderParts parts_;
  Device& device_;
  const KvShape kv_shape_;
  const DecoderBytes bytes_;
  StepImage image_;
  LoraBatch lora_;
  // Of the current step; sized for the largest.
  std::vector<SequenceRange> sequences_;
  std::vector<int64_t> logits_tokens_;  // by logits row, the token whose logits the row gets
  std::vector<LinearTask> tasks_;
  OpContext context_;
  Workspace workspace_;  // in the step's arena
  // On the device.
  const int32_t* tokens_ = nullptr;
  const int32_t* positions_ = nullptr;
  const int64_t* logits_rows_ = nullptr;
  SequenceRanges ranges_;
};

void DecoderImpl::CheckSequence(const Batch& batch, const KvPool& kv, int64_t index) const {
  const BatchSequence& sequence = batch.sequences[index];
  const int64_t end = sequence.position + sequence.num_tokens;
  AS_CHECK(sequence.num_tokens > 0 && sequence.position >= 0 && end <= parts_.options.max_length)
      << "batch: sequence " << index << " has positions [" << sequence.position << ", " << end
      << "); the decoder covers [0, " << parts_.options.max_length << ")";
  AS_CHECK(sequence.lora == nullptr || sequence.lora->rank() <= parts_.options.lora_max_rank)
      << "batch: sequence " << index << " has an adapter of rank " << sequence.lora->rank()
      << "; the decoder takes " << parts_.options.lora_max_rank;
  AS_CHECK(sequence.block_table != nullptr) << "batch: sequence " << index << " has no blocks";
  const int64_t block_size = parts_.options.block_size;
  for (int64_t b = 0; b < CeilDiv(end, block_size); ++b) {
    AS_CHECK(sequence.block_table[b] >= 0 && sequence.block_table[b] < kv.num_blocks)
        << "batch: sequence " << index << " has block " << sequence.block_table[b] << " at index "
        << b << "; the pool has " << kv.num_blocks;
  }
  if (sequence.logits_row < 0) return;
  AS_CHECK(sequence.num_logits >= 1 && sequence.num_logits <= sequence.num_tokens &&
           sequence.logits_row + sequence.num_logits <= batch.num_logits_rows)
      << "batch: sequence " << index << " of " << sequence.num_tokens << " tokens wants "
      << sequence.num_logits << " logits rows from " << sequence.logits_row << " on; there are "
      << batch.num_logits_rows;
}

void DecoderImpl::CheckBatch(const Batch& batch, const KvPool& kv) const {
  const DecoderOptions& options = parts_.options;
  AS_CHECK(batch.num_tokens <= options.max_tokens)
      << "batch: " << batch.num_tokens << " tokens; at most " << options.max_tokens;
  AS_CHECK(batch.num_logits_rows >= 0 && batch.num_logits_rows <= options.max_logits_rows)
      << "batch: " << batch.num_logits_rows << " logits rows; at most " << options.max_logits_rows;
  AS_CHECK(kv.data != nullptr) << "batch: no KV pool";
  AS_CHECK(kv.shape == kv_shape_) << "batch: a KV pool of " << kv.shape.num_layers << " layers, "
                                  << kv.shape.kv_heads << " heads of " << kv.shape.head_dim
                                  << ", in blocks of " << kv.shape.block_size
                                  << ", is not the decoder's";
  for (int64_t i = 0; i < batch.num_tokens; ++i) {
    const int32_t position = batch.positions[i];
    AS_CHECK(position >= 0 && position < options.max_length)
        << "batch: token " << i << " is at position " << position << "; the decoder covers [0, "
        << options.max_length << ")";
    if (batch.tokens == nullptr) continue;
    AS_CHECK(batch.tokens[i] >= 0 && batch.tokens[i] < parts_.shape.vocab_size)
        << "batch: token " << i << " is id " << batch.tokens[i] << "; it must be in [0, "
        << parts_.shape.vocab_size << ")";
  }
  int64_t tokens = 0;
  int64_t logits_rows = 0;
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    AS_CHECK(batch.sequences[s].token_begin == tokens &&
             batch.sequences[s].num_tokens <= batch.num_tokens - tokens)
        << "batch: sequence " << s << " has tokens [" << batch.sequences[s].token_begin << ", +"
        << batch.sequences[s].num_tokens << "); expected them to begin at " << tokens
        << " and to end by " << batch.num_tokens;
    CheckSequence(batch, kv, s);
    tokens += batch.sequences[s].num_tokens;
    if (batch.sequences[s].logits_row >= 0) logits_rows += batch.sequences[s].num_logits;
  }
  AS_CHECK(tokens == batch.num_tokens)
      << "batch: the sequences have " << tokens << " tokens of " << batch.num_tokens;
  AS_CHECK(logits_rows == batch.num_logits_rows)
      << "batch: " << logits_rows << " rows of logits are wanted; there are "
      << batch.num_logits_rows;
}

void DecoderImpl::TakeBatch(const Batch& batch) {
  image_.Clear();
  std::fill_n(logits_tokens_.begin(), batch.num_logits_rows, -1);
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const BatchSequence& sequence = batch.sequences[s];
    const int64_t blocks =
        CeilDiv(sequence.position + sequence.num_tokens, parts_.options.block_size);
    sequences_[static_cast<size_t>(s)] = {sequence.token_begin, sequence.num_tokens,
                                          sequence.position,
                                          image_.Put(sequence.block_table, blocks)};
    if (sequence.logits_row < 0) continue;
    const int64_t first = sequence.token_begin + sequence.num_tokens - sequence.num_logits;
    for (int32_t i = 0; i < sequence.num_logits; ++i) {
      int64_t& token = logits_tokens_[static_cast<size_t>(sequence.logits_row + i)];
      AS_CHECK(token == -1) << "batch: two sequences want logits row " << sequence.logits_row + i;
      token = first + i;
    }
  }
  tokens_ = batch.tokens == nullptr ? nullptr : image_.Put(batch.tokens, batch.num_tokens);
  positions_ = image_.Put(batch.positions, batch.num_tokens);
  logits_rows_ = image_.Put(logits_tokens_.data(), batch.num_logits_rows);
  const auto num_sequences = static_cast<size_t>(batch.num_sequences);
  ranges_ = {{sequences_.data(), num_sequences},
             image_.Put(sequences_.data(), batch.num_sequences)};
  image_.HandOver();
}

void DecoderImpl::Forward(const Batch& batch, const KvPool& kv, StepArena& arena, float* logits) {
  const OpTimer timer(batch.profile, Op::kPass);
  CheckBatch(batch, kv);
  if (batch.num_tokens == 0) return;
  RunLayers(batch, kv, arena, /*in=*/nullptr);
  LogitsOf(logits_tokens_.data(), logits_rows_, batch.num_logits_rows, logits);
}

void DecoderImpl::ForwardLayers(const Batch& batch, const KvPool& kv, StepArena& arena,
                                const float* in, float* out) {
  CheckBatch(batch, kv);
  AS_CHECK(batch.num_logits_rows == 0) << "batch: " << batch.num_logits_rows << " rows of logits";
  if (batch.num_tokens == 0) return;
  RunLayers(batch, kv, arena, in);
  const Matrix& stream = workspace_.residual;
  AS_CHECK(stream.ld == stream.cols) << "batch: rows of the stream are " << stream.ld << " apart";
  if (out != nullptr) device_.ops().Download(out, stream.data, StreamBytes(batch));
}

size_t DecoderImpl::StreamBytes(const Batch& batch) const {
  return static_cast<size_t>(batch.num_tokens * parts_.shape.hidden) * sizeof(float);
}

void DecoderImpl::RunLayers(const Batch& batch, const KvPool& kv, StepArena& arena,
                            const float* in) {
  TakeBatch(batch);
  const DecoderShape& shape = parts_.shape;
  lora_.Take(batch);
  workspace_ =
      AllocateWorkspace(shape, SizeFor(batch.num_tokens, parts_.options), device_.ops(), arena);
  const Workspace& w = workspace_;
  context_ = {&device_.ops(), w.row_scratch, batch.profile, batch.observer};
  StepInput step;
  step.sequences = ranges_;
  step.positions = positions_;
  step.lora = &lora_;
  step.tasks = &tasks_;
  step.max_length = parts_.options.max_length;
  step.logn_length = parts_.options.use_logn_attn ? shape.max_position : 0;
  step.alibi_slopes = parts_.weights.alibi_slopes;
  if (in == nullptr) {
    Embed(0, w.residual);
  } else {
    device_.ops().Upload(w.residual.data, in, StreamBytes(batch));
  }
  for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
    const LayerWeights& weights = parts_.weights.layers[static_cast<size_t>(layer)];
    step.layer = layer;
    const bool windowed = shape.window_rope && weights.attention.window > 0;
    step.rope = windowed ? parts_.window_rope.view() : parts_.rope.view();
    if (shape.parallel_residual && !shape.shares_normed()) {
      ReadResidualInto(context_, weights.mlp_norm, weights.mlp.gate_up.input, w.mlp_normed, w);
    }
    RunAttention(context_, shape, weights.attention, {kv, layer}, step, w);
    if (weights.moe.router.data != nullptr) {
      RunExperts(context_, shape, weights, step, w);
    } else {
      RunMlp(context_, shape, weights, step, w);
    }
  }
}

void DecoderImpl::Embed(int64_t token_begin, const Matrix& out) {
  AS_CHECK(tokens_ != nullptr) << "batch: it has no tokens to embed";
  const int32_t* ids = tokens_ + token_begin;
  EmbeddingLookup(context_, parts_.weights.embedding, ids, out);
  lora_.AddEmbedding(context_, ids, token_begin, workspace_.lora, out);
  const Scaling& scaling = parts_.shape.embedding_scaling;
  if (!scaling.is_identity()) Scale(context_, out, scaling, /*accumulate=*/false, out);
  const EmbeddingWeight& positions = parts_.weights.position_embedding;
  if (positions.data != nullptr) {
    EmbeddingLookup(context_, positions, positions_ + token_begin, out, /*accumulate=*/true);
  }
  const NormWeight& norm = parts_.weights.embedding_norm;
  if (norm.weight != nullptr) Norm(context_, out, norm, out);
}

void DecoderImpl::Logits(const int64_t* tokens, int64_t num_tokens, float* logits) {
  for (int64_t i = 0; i < num_tokens; ++i) CheckTokens(tokens[i], 1);
  const int64_t* const rows = image_.Put(tokens, num_tokens);
  image_.HandOver();
  LogitsOf(tokens, rows, num_tokens, logits);
}

void DecoderImpl::LogitsOf(const int64_t* tokens, const int64_t* row_ids, int64_t num_tokens,
                           float* logits) {
  if (num_tokens == 0) return;
  AS_CHECK(logits != nullptr) << "batch: logits wanted, but no place to write them";
  AS_CHECK(num_tokens <= workspace_.residual.rows)
      << "batch: " << num_tokens << " rows of logits of " << workspace_.residual.rows << " tokens";
  // The norm reads only the wanted rows, and writes them to a buffer that no layer needs any more.
  Matrix rows = workspace_.normed.As(parts_.weights.lm_head.input);
  rows.rows = num_tokens;
  NormGather(context_, workspace_.residual, row_ids, parts_.weights.final_norm, rows);
  const ConstMatrix x = InOrder(context_, rows, parts_.weights.lm_head, workspace_);
  const int64_t vocab = parts_.shape.vocab_size;
  const Matrix out{logits, DType::kFloat32, num_tokens, vocab, vocab};
  Linear(context_, x, parts_.weights.lm_head, /*accumulate=*/false, out,
         lora_.LmHead(context_, x, tokens, workspace_.lora));
  const Scaling& scaling = parts_.shape.logits_scaling;
  if (!scaling.is_identity()) Scale(context_, out, scaling, /*accumulate=*/false, out);
}

void DecoderImpl::CheckTokens(int64_t token_begin, int64_t num_tokens) const {
  AS_CHECK(token_begin >= 0 && num_tokens >= 1 &&
           num_tokens <= workspace_.residual.rows - token_begin)
      << "batch: tokens [" << token_begin << ", +" << num_tokens << ") wanted; it has "
      << workspace_.residual.rows;
}

void DecoderImpl::HiddenStates(int64_t token_begin, int64_t num_tokens, float* hidden) {
  CheckTokens(token_begin, num_tokens);
  const int64_t cols = parts_.shape.hidden;
  const ConstMatrix x = RowsOf(workspace_.residual, token_begin, token_begin + num_tokens);
  const Matrix rows = RowsOf(workspace_.output, 0, num_tokens);
  Norm(context_, x, parts_.weights.final_norm, rows);
  device_.ops().Download(hidden, rows.data, static_cast<size_t>(num_tokens * cols) * sizeof(float));
}

void DecoderImpl::InputEmbeddings(int64_t token_begin, int64_t num_tokens, float* embeddings) {
  CheckTokens(token_begin, num_tokens);
  const int64_t cols = parts_.shape.hidden;
  const Matrix rows = RowsOf(workspace_.output, 0, num_tokens);
  Embed(token_begin, rows);
  device_.ops().Download(embeddings, rows.data,
                         static_cast<size_t>(num_tokens * cols) * sizeof(float));
}

// The rope frequencies, extended if the options say so. Separate frequencies of layers with a
// window stay as they are: these layers do not see farther in longer sequences.
Result<std::vector<float>> Frequencies(const DecoderParts& parts) {
  const DecoderOptions& options = parts.options;
  const std::span<const float> given(parts.weights.rope_inv_freq,
                                     static_cast<size_t>(parts.shape.rotary_dim / 2));
  std::vector<float> own(given.begin(), given.end());
  if (options.rope_scaling_factor == 0) return own;
  Result<std::vector<float>> extended = ExtendFrequencies(
      given, options.rope_scaling_factor, options.max_length, parts.shape.max_position);
  if (!extended.ok() && options.may_keep_rope) return own;
  return extended;
}

Result<std::unique_ptr<Decoder>> CreateImpl(const ModelReader& weights,
                                            const DecoderOptions& options, Device& device) {
  DecoderParts parts(device);
  parts.options = options;
  AS_RETURN_IF_ERROR(CheckOptions(options));
  AS_ASSIGN_OR_RETURN(parts.shape, MakeDecoderShape(weights.spec(), options.cache_mode));
  AS_RETURN_IF_ERROR(CheckLearnedPositions(parts.shape, options.max_length));
  AS_RETURN_IF_ERROR(CheckOps(parts.shape, weights.spec(), device.ops()));
  AS_ASSIGN_OR_RETURN(parts.weights, BindWeights(weights, parts.shape, parts.placed));
  if (device.copies_weights()) weights.ReleasePages();  // They have been read.
  const auto make_rope = [&](const char* name, const float* inv_freq) {
    return RopeTable::Create(parts.shape, name, inv_freq, options.max_length, device);
  };
  AS_ASSIGN_OR_RETURN(const std::vector<float> frequencies, Frequencies(parts));
  const bool has_rope = parts.shape.rotary_dim > 0;
  AS_ASSIGN_OR_RETURN(parts.rope,
                      make_rope("rope.inv_freq", has_rope ? frequencies.data() : nullptr));
  AS_ASSIGN_OR_RETURN(parts.window_rope,
                      make_rope("rope.window_inv_freq", parts.weights.rope_window_inv_freq));
  AS_ASSIGN_OR_RETURN(StepImage image, StepImage::Create(device, ImageBytes(options)));
  return std::unique_ptr<Decoder>(
      std::make_unique<DecoderImpl>(std::move(parts), std::move(image), device));
}

}  // namespace

Result<DecoderBytes> Decoder::Measure(const ModelReader& weights, const DecoderOptions& options,
                                      const Device& device) {
  AS_ASSIGN_OR_RETURN(const DecoderShape shape,
                      MakeDecoderShape(weights.spec(), options.cache_mode));
  AS_RETURN_IF_ERROR(CheckLearnedPositions(shape, options.max_length));
  DecoderBytes bytes = BytesOf(shape, options, device);
  if (device.copies_weights()) {
    for (const proto::TensorRecord& tensor : weights.file().tensors()) {
      bytes.weights += static_cast<int64_t>(tensor.bytes());
    }
  }
  return bytes;
}

Result<std::unique_ptr<Decoder>> Decoder::Create(const ModelReader& weights,
                                                 const DecoderOptions& options, Device& device) {
  try {
    return CreateImpl(weights, options, device);
  } catch (const InternalError& error) {
    return Status::Internal(error.what());
  } catch (const std::bad_alloc&) {
    return Status::ResourceExhausted("no heap memory for a decoder of " +
                                     std::to_string(options.max_tokens) + " tokens");
  }
}

}  // namespace allspark
