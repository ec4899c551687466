// ModelInstance: the sizes of all parts of a model, computed from its spec and config when it is
// installed. Start then allocates these sizes.

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <string>

#include "base/int_math.h"
#include "base/log.h"
#include "engine/model_instance.h"
#include "kv_cache/extent.h"
#include "platform/system_limits.h"

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
  }
  return totals;
}

// The cost of each row after the first, as a fraction of a step of one row. Measured at the 0.5B
// shape: 3 % with 16 bits a weight, 5 % with 8 and 9 % with 4, where reading the weights takes less
// time. A row with other experts also reads those experts.
double RowCost(const WeightTotals& weights) {
  return std::max(0.03, 0.5 * weights.elements_read / (8 * weights.bytes_read)) +
         weights.next_bytes / weights.bytes_read;
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

}  // namespace

Status ModelInstance::CheckDraftModel() const {
  if (draft_reader_ == nullptr) return Status::Ok();
  const int64_t vocab_size = draft_reader_->spec().vocab_size();
  if (vocab_size == reader_->spec().vocab_size()) return Status::Ok();
  return Status::InvalidArgument("draft_model is '" + config_.draft_model +
                                 "', whose vocabulary has " + std::to_string(vocab_size) +
                                 " tokens; it must be that of model '" + config_.model_name +
                                 "', which has " + std::to_string(reader_->spec().vocab_size()));
}

void ModelInstance::SetOptions() {
  chunk_tokens_ = config_.engine_max_prefill_length > 0 ? config_.engine_max_prefill_length
                                                        : kDefaultChunkTokens;
  chunk_tokens_ = std::min(chunk_tokens_, config_.engine_max_length);
  row_cost_ = RowCost(TotalsOf(*reader_));
  decoder_options_.max_length = config_.engine_max_length;
  decoder_options_.max_logits_rows =
      std::max(config_.engine_max_batch, config_.max_draft_rows) + kLogitsSliceRows;
  decoder_options_.max_tokens =
      std::max(chunk_tokens_ + config_.engine_max_batch, decoder_options_.max_logits_rows);
  decoder_options_.block_size = config_.cache_span_size;
  decoder_options_.cache_mode = config_.cache_mode;
  decoder_options_.rope_scaling_factor = config_.rope_scaling_factor;
  decoder_options_.use_logn_attn = config_.use_logn_attn;
  decoder_options_.lora_max_rank = config_.lora_max_num > 0 ? config_.lora_max_rank : 0;
  limits_ = {.vocab_size = reader_->spec().vocab_size(),
             .hidden_size = reader_->spec().hidden_size(),
             .engine_max_length = config_.engine_max_length,
             .engine_max_batch = config_.engine_max_batch,
             .block_size = config_.cache_span_size,
             .num_draft_tokens = draft_reader_ != nullptr ? config_.num_draft_tokens : 0};
}

DraftModelOptions ModelInstance::DraftOptions() const {
  DraftModelOptions options;
  options.decoder = decoder_options_;
  options.decoder.lora_max_rank = 0;  // It drafts without adapters.
  options.decoder.max_logits_rows = config_.engine_max_batch;
  options.num_blocks = num_blocks_;
  options.num_tokens = config_.num_draft_tokens;
  options.chunk_tokens = chunk_tokens_;
  options.cost = TotalsOf(*draft_reader_).bytes_read / TotalsOf(*reader_).bytes_read;
  return options;
}

Status ModelInstance::SizeUp() {
  SetOptions();
  const int64_t num_threads = device_.pool->num_threads();
  Result<DecoderBytes> model = Decoder::Measure(*reader_, decoder_options_, num_threads);
  if (!model.ok()) return model.status();
  Result<DecoderBytes> draft = DecoderBytes{};
  if (draft_reader_ != nullptr) {
    draft =
        Decoder::Measure(*draft_reader_, DraftModel::DecoderOptionsOf(DraftOptions()), num_threads);
    if (!draft.ok()) {
      return Status(draft.status().code(),
                    "draft_model is '" + config_.draft_model +
                        "', which cannot be used: " + draft.status().message());
    }
  }
  const int64_t block_bytes = model->block + draft->block;
  AS_RETURN_IF_ERROR(SizePool(block_bytes));
  FillInfo(block_bytes);
  info_.work_bytes =
      std::max(model->arena, draft->arena) + model->tables + draft->tables +
      decoder_options_.max_logits_rows * limits_.vocab_size * static_cast<int64_t>(sizeof(float));
  AS_LOG(kInfo) << "model '" << config_.model_name
                << "' is installed: " << (info_.weight_bytes >> 20)
                << " MiB of weights; its KV cache will hold "
                << PoolText(num_blocks_, config_.cache_span_size, block_bytes) << ", room for "
                << info_.num_longest_request << " requests of engine_max_length "
                << config_.engine_max_length << "; " << (info_.work_bytes >> 20)
                << " MiB for its steps";
  return Status::Ok();
}

Status ModelInstance::SizePool(int64_t block_bytes) {
  const int64_t block_size = config_.cache_span_size;
  const int64_t blocks_per_request = CeilDiv(config_.engine_max_length, block_size);
  const AllocatorStats stats = device_.allocator->Stats();
  const bool is_reserved = stats.largest_free_bytes > 0;
  const MemoryBound available = is_reserved ? MemoryForReserved() : AvailableMemory();
  const int64_t region_free = is_reserved ? stats.largest_free_bytes : available.bytes;
  if (config_.cache_span_num_init > 0) {
    num_blocks_ = config_.cache_span_num_init;
  } else {
    const int64_t budget = std::min(available.bytes / 2, region_free);
    const int64_t wanted = RoundUpToExtents(config_.engine_max_batch * blocks_per_request);
    num_blocks_ = std::min(wanted, budget / block_bytes);
    const int64_t whole = num_blocks_ / kMostExtentBlocks * kMostExtentBlocks;
    if (num_blocks_ < wanted && whole >= blocks_per_request) num_blocks_ = whole;
  }
  if (num_blocks_ < blocks_per_request) {
    return Status::ResourceExhausted(
        "the KV cache pool can have " + PoolText(num_blocks_, block_size, block_bytes) +
        ", but one request of engine_max_length " + std::to_string(config_.engine_max_length) +
        " needs " + PoolText(blocks_per_request, block_size, block_bytes) +
        "; lower engine_max_length or give more memory: " + available.source);
  }
  if (num_blocks_ * block_bytes > region_free) {
    return Status::ResourceExhausted("cache_span_num_init is " + std::to_string(num_blocks_) +
                                     ", a KV cache pool of " +
                                     PoolText(num_blocks_, block_size, block_bytes) +
                                     "; the device's memory region has room for " +
                                     PoolText(region_free / block_bytes, block_size, block_bytes) +
                                     " (BFC_MEM_RATIO and BFC_LEFTOVER_MB set its size)");
  }
  if (config_.enable_prefix_cache && device_.host_copier != nullptr) {
    num_host_blocks_ = device_.host_cache_bytes / block_bytes;
  }
  return Status::Ok();
}

void ModelInstance::FillInfo(int64_t block_bytes) {
  const proto::DecoderSpec& spec = reader_->spec();
  const int64_t block_size = config_.cache_span_size;
  info_.model_name = config_.model_name;
  info_.architecture = spec.architecture();
  info_.source = reader_->source();
  info_.model_digest = DigestText(reader_->file().file_id());
  info_.vocab_size = spec.vocab_size();
  info_.hidden_size = spec.hidden_size();
  info_.num_layers = spec.num_layers();
  info_.engine_max_length = config_.engine_max_length;
  info_.engine_max_batch = config_.engine_max_batch;
  info_.cache_mode = config_.cache_mode;
  info_.total_token = num_blocks_ * block_size;
  info_.total_span = num_blocks_;
  info_.span_size = block_size;
  info_.num_longest_request = num_blocks_ / CeilDiv(config_.engine_max_length, block_size);
  info_.bytes_per_token = block_bytes / block_size;  // a block's parts grow with its tokens
  info_.kv_pool_bytes = num_blocks_ * block_bytes;
  for (const ModelReader* reader : {reader_.get(), draft_reader_.get()}) {
    if (reader != nullptr) info_.weight_bytes += static_cast<int64_t>(TotalsOf(*reader).bytes);
  }
}

}  // namespace allspark
