#include "engine/model_sizes.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <string>

#include "base/int_math.h"
#include "base/log.h"
#include "kv_cache/extent.h"

namespace allspark {
namespace {

constexpr int64_t kDefaultChunkTokens = 512;
// Rows of logits besides the sampled ones, for prompt tokens whose logits a request wants. In
// slices of this many rows, a token costs what it would in one pass over a whole chunk
// (benchmarks/notes.md).
constexpr int64_t kLogitsSliceRows = 32;

struct WeightTotals {
  double bytes = 0;                          // of all tensors
  double bytes_read = 0, elements_read = 0;  // by a step of one token, about
  double next_bytes = 0;                     // that a second token's own experts add
  // A token's products with the layers' weights. Those of int8 activations count half, which is
  // about what they take.
  double products = 0;
};
WeightTotals TotalsOf(const ModelReader& reader) {
  const proto::DecoderSpec& spec = reader.spec();
  WeightTotals totals;
  for (const proto::TensorRecord& tensor : reader.file().tensors()) {
    double size = 1;
    for (int64_t extent : tensor.shape()) size *= static_cast<double>(extent);
    const auto bytes = static_cast<double>(tensor.bytes());
    const bool experts = tensor.name().find(".experts_") != std::string::npos;
    const double share = experts ? static_cast<double>(spec.experts_per_token()) /
                                       static_cast<double>(spec.num_experts())
                                 : 1;
    totals.bytes += bytes;
    totals.bytes_read += share * bytes;
    totals.elements_read += share * size;
    totals.next_bytes += share * (1 - share) * bytes;
    if (tensor.layout() == proto::PANEL64 && tensor.name().starts_with("layers.")) {
      const proto::WeightQuant* const quant = FindWeightQuant(spec, tensor.name());
      const bool int8 = quant != nullptr && quant->quantize_activations();
      totals.products += share * size * (int8 ? 0.5 : 1);
    }
  }
  return totals;
}

// The cost of each row after the first, as a fraction of a step of one row. Measured at the 0.5B
// shape: 3 % with 16 bits a weight, 5 % with 8 and 9 % with 4, where reading the weights takes less
// time. A row with other experts also reads those experts.
double DraftRowCost(const WeightTotals& weights) {
  return std::max(0.03, 0.5 * weights.elements_read / (8 * weights.bytes_read)) +
         weights.next_bytes / weights.bytes_read;
}

// How far into a sequence attention takes a token about as long as all other products of it. 0: no
// layer reads more than a window.
int64_t DoubleCostDepth(const WeightTotals& weights, const proto::DecoderSpec& spec) {
  const auto& windows = spec.layer_window();
  const auto num_full =
      windows.empty() ? spec.num_layers() : std::count(windows.begin(), windows.end(), 0);
  if (num_full == 0) return 0;
  // A key is multiplied by a query, and a value by its weight.
  const int64_t dims =
      spec.kv_latent() > 0 ? 2 * spec.kv_latent() + spec.rotary_dim() : 2 * spec.head_dim();
  const auto per_key = static_cast<double>(num_full * spec.num_heads() * dims);
  return std::max<int64_t>(static_cast<int64_t>(weights.products / per_key), 1);
}

std::string DigestText(uint64_t digest) {
  char text[17];
  snprintf(text, sizeof(text), "%016" PRIx64, digest);
  return text;
}

// "2048 tokens (64 blocks of 32, 24 MiB)".
std::string PoolText(int64_t num_blocks, int64_t block_size, int64_t block_bytes) {
  return std::to_string(num_blocks * block_size) + " tokens (" + std::to_string(num_blocks) +
         " blocks of " + std::to_string(block_size) + ", " +
         std::to_string((num_blocks * block_bytes) >> 20) + " MiB)";
}

Status CheckVocabulary(const RuntimeConfig& config, const ModelReader& reader,
                       const ModelReader& draft) {
  const int64_t vocab_size = draft.spec().vocab_size();
  if (vocab_size == reader.spec().vocab_size()) return Status::Ok();
  return Status::InvalidArgument("draft_model is '" + config.draft_model +
                                 "', whose vocabulary has " + std::to_string(vocab_size) +
                                 " tokens; it must be that of model '" + config.model_name +
                                 "', which has " + std::to_string(reader.spec().vocab_size()));
}

void SetOptions(const RuntimeConfig& config, const ModelReader& reader, bool has_draft_model,
                ModelSizes& sizes) {
  sizes.chunk_tokens =
      config.engine_max_prefill_length > 0 ? config.engine_max_prefill_length : kDefaultChunkTokens;
  sizes.chunk_tokens = std::min(sizes.chunk_tokens, config.engine_max_length);
  const WeightTotals weights = TotalsOf(reader);
  sizes.draft_row_cost = DraftRowCost(weights);
  sizes.double_cost_depth = DoubleCostDepth(weights, reader.spec());
  DecoderOptions& decoder = sizes.decoder;
  decoder.max_length = config.engine_max_length;
  decoder.max_logits_rows =
      std::max(config.engine_max_batch, config.max_draft_rows) + kLogitsSliceRows;
  decoder.max_tokens =
      std::max(sizes.chunk_tokens + config.engine_max_batch, decoder.max_logits_rows);
  decoder.block_size = config.block_size;
  decoder.cache_mode = config.cache_mode;
  decoder.rope_scaling_factor = config.rope_scaling_factor;
  decoder.use_logn_attn = config.use_logn_attn;
  decoder.lora_max_rank = config.lora_max_num > 0 ? config.lora_max_rank : 0;
  sizes.limits = {.vocab_size = reader.spec().vocab_size(),
                  .hidden_size = reader.spec().hidden_size(),
                  .engine_max_length = config.engine_max_length,
                  .engine_max_batch = config.engine_max_batch,
                  .block_size = config.block_size,
                  .num_draft_tokens = has_draft_model ? config.num_draft_tokens : 0};
}

// All but num_blocks, which is not known yet.
DraftModelOptions DraftOptions(const RuntimeConfig& config, const ModelReader& reader,
                               const ModelReader& draft, const ModelSizes& sizes) {
  DraftModelOptions options;
  options.decoder = sizes.decoder;
  options.decoder.lora_max_rank = 0;     // It drafts without adapters.
  options.decoder.may_keep_rope = true;  // Its rope changes nothing but the speed.
  options.decoder.max_logits_rows = config.engine_max_batch;
  options.num_tokens = config.num_draft_tokens;
  options.chunk_tokens = sizes.chunk_tokens;
  options.cost = TotalsOf(draft).bytes_read / TotalsOf(reader).bytes_read;
  return options;
}

int64_t WorkBytes(const DecoderBytes& model, const DecoderBytes& draft, const ModelSizes& sizes) {
  const int64_t logits = sizes.decoder.max_logits_rows * sizes.limits.vocab_size;
  return std::max(model.arena, draft.arena) + model.tables + draft.tables + model.image +
         draft.image + logits * static_cast<int64_t>(sizeof(float));
}

// The room that is left for the pool. A device that computes with copies of the weights has less by
// these, and by all that its steps work in.
Result<DeviceRoom> RoomForPool(const RuntimeConfig& config, const Device& device,
                               int64_t weight_bytes, int64_t work_bytes) {
  DeviceRoom room = device.room();
  if (!device.copies_weights()) return room;
  const int64_t taken = weight_bytes + work_bytes;
  if (taken >= room.largest) {
    return Status::ResourceExhausted(
        "model '" + config.model_name + "' takes " + std::to_string(weight_bytes >> 20) +
        " MiB of the device's memory for weights and " + std::to_string(work_bytes >> 20) +
        " MiB for its steps; there is room for " + std::to_string(room.largest >> 20) +
        " MiB: " + room.source);
  }
  room.bytes -= taken;
  room.largest -= taken;
  return room;
}

// Sets num_blocks and num_host_blocks. block_bytes: a block of the model and, if there is one, of
// the draft model.
Status SizePool(const RuntimeConfig& config, const Device& device, const DeviceRoom& room,
                int64_t block_bytes, ModelSizes& sizes) {
  const int64_t block_size = config.block_size;
  const int64_t blocks_per_request = CeilDiv(config.engine_max_length, block_size);
  int64_t& num_blocks = sizes.num_blocks;
  if (config.num_blocks > 0) {
    num_blocks = config.num_blocks;
  } else {
    const int64_t budget = std::min(room.bytes / 2, room.largest);
    const int64_t wanted = RoundUpToExtents(config.engine_max_batch * blocks_per_request);
    num_blocks = std::min(wanted, budget / block_bytes);
    const int64_t whole = num_blocks / kMostExtentBlocks * kMostExtentBlocks;
    if (num_blocks < wanted && whole >= blocks_per_request) num_blocks = whole;
  }
  if (num_blocks < blocks_per_request) {
    return Status::ResourceExhausted(
        "the KV cache pool can have " + PoolText(num_blocks, block_size, block_bytes) +
        ", but one request of engine_max_length " + std::to_string(config.engine_max_length) +
        " needs " + PoolText(blocks_per_request, block_size, block_bytes) +
        "; lower engine_max_length or give more memory: " + room.source);
  }
  if (num_blocks * block_bytes > room.largest) {
    return Status::ResourceExhausted("cache_span_num_init is " + std::to_string(num_blocks) +
                                     ", a KV cache pool of " +
                                     PoolText(num_blocks, block_size, block_bytes) +
                                     "; the device's memory region has room for " +
                                     PoolText(room.largest / block_bytes, block_size, block_bytes) +
                                     " (BFC_MEM_RATIO and BFC_LEFTOVER_MB set its size)");
  }
  if (config.enable_prefix_cache) {
    sizes.num_host_blocks = device.host_cache_bytes() / block_bytes;
  }
  return Status::Ok();
}

void FillInfo(const RuntimeConfig& config, const ModelReader& reader, const ModelReader* draft,
              int64_t block_bytes, ModelSizes& sizes) {
  const proto::DecoderSpec& spec = reader.spec();
  const int64_t block_size = config.block_size;
  ModelInfo& info = sizes.info;
  info.model_name = config.model_name;
  info.architecture = spec.architecture();
  info.source = reader.source();
  info.model_digest = DigestText(reader.file().file_id());
  info.vocab_size = spec.vocab_size();
  info.hidden_size = spec.hidden_size();
  info.num_layers = spec.num_layers();
  info.engine_max_length = config.engine_max_length;
  info.engine_max_batch = config.engine_max_batch;
  info.cache_mode = config.cache_mode;
  info.total_token = sizes.num_blocks * block_size;
  info.total_blocks = sizes.num_blocks;
  info.block_size = block_size;
  info.num_longest_request = sizes.num_blocks / CeilDiv(config.engine_max_length, block_size);
  info.bytes_per_token = block_bytes / block_size;  // a block's parts grow with its tokens
  info.kv_pool_bytes = sizes.num_blocks * block_bytes;
  for (const ModelReader* weights : {&reader, draft}) {
    if (weights != nullptr) info.weight_bytes += static_cast<int64_t>(TotalsOf(*weights).bytes);
  }
}

}  // namespace

Result<ModelSizes> ModelSizes::Measure(const RuntimeConfig& config, const ModelReader& reader,
                                       const ModelReader* draft_reader, const Device& device) {
  ModelSizes sizes;
  if (draft_reader != nullptr) {
    AS_RETURN_IF_ERROR(CheckVocabulary(config, reader, *draft_reader));
  }
  SetOptions(config, reader, draft_reader != nullptr, sizes);
  AS_ASSIGN_OR_RETURN(const DecoderBytes model, Decoder::Measure(reader, sizes.decoder, device));
  Result<DecoderBytes> draft = DecoderBytes{};
  if (draft_reader != nullptr) {
    sizes.draft = DraftOptions(config, reader, *draft_reader, sizes);
    draft = Decoder::Measure(*draft_reader, DraftModel::DecoderOptionsOf(sizes.draft), device);
    if (!draft.ok()) return DraftModelError(config, draft.status());
  }
  const int64_t block_bytes = model.block + draft->block;
  const int64_t work_bytes = WorkBytes(model, *draft, sizes);
  AS_ASSIGN_OR_RETURN(const DeviceRoom room,
                      RoomForPool(config, device, model.weights + draft->weights, work_bytes));
  AS_RETURN_IF_ERROR(SizePool(config, device, room, block_bytes, sizes));
  sizes.draft.num_blocks = sizes.num_blocks;
  FillInfo(config, reader, draft_reader, block_bytes, sizes);
  ModelInfo& info = sizes.info;
  info.work_bytes = work_bytes;
  AS_LOG(kInfo) << "model '" << config.model_name << "' is installed: " << (info.weight_bytes >> 20)
                << " MiB of weights; its KV cache will hold "
                << PoolText(sizes.num_blocks, config.block_size, block_bytes) << ", room for "
                << info.num_longest_request << " requests of engine_max_length "
                << config.engine_max_length << "; " << (info.work_bytes >> 20)
                << " MiB for its steps";
  return sizes;
}

}  // namespace allspark
