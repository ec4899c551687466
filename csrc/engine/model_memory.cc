#include "engine/model_memory.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "base/int_math.h"
#include "engine/draft_model.h"

namespace allspark {

Result<int64_t> ModelMemory::AddDraftModel() {
  if (model_.draft_reader == nullptr) return 0;
  Result<std::unique_ptr<DraftModel>> model = DraftModel::Create(
      *model_.draft_reader, model_.sizes.draft, *model_.device, {arena_, logits_, *sampler_});
  if (!model.ok()) return DraftModelError(model_.config, model.status());
  const int64_t arena_bytes = (*model)->arena_bytes();
  drafters_.push_back(std::move(*model));
  return arena_bytes;
}

Status ModelMemory::Take() {
  Device& device = *model_.device;
  const ModelSizes& sizes = model_.sizes;
  AS_ASSIGN_OR_RETURN(decoder_, Decoder::Create(*model_.reader, sizes.decoder, device));
  AS_ASSIGN_OR_RETURN(kv_, KvMemory::Create(device, decoder_->kv_shape(), sizes.num_blocks));
  host_blocks_.resize(static_cast<size_t>(sizes.num_host_blocks * kv_.block_bytes()));

  const int64_t vocab_size = sizes.limits.vocab_size;
  sampler_ = device.MakeSampler(vocab_size);
  drafters_.push_back(std::make_unique<PromptLookupDrafter>());
  AS_ASSIGN_OR_RETURN(const int64_t draft_arena_bytes, AddDraftModel());

  const int64_t arena_bytes = std::max(decoder_->arena_bytes(), draft_arena_bytes);
  AS_ASSIGN_OR_RETURN(Buffer arena,
                      Buffer::Create(device.allocator(), static_cast<size_t>(arena_bytes)));
  arena_ = StepArena(std::move(arena));
  AS_ASSIGN_OR_RETURN(logits_,
                      LogitsBuffer::Create(device, sizes.decoder.max_logits_rows, vocab_size));
  is_taken_ = true;
  return Status::Ok();
}

// Drafters and decoder first: they refer to the rest.
void ModelMemory::GiveBack() {
  is_taken_ = false;
  model_.device->Finish();
  drafters_.clear();
  decoder_.reset();
  sampler_.reset();
  kv_ = KvMemory();
  std::vector<unsigned char>().swap(host_blocks_);
  arena_ = StepArena();
  logits_ = LogitsBuffer();
}

void ModelMemory::Forward(const Batch& batch) {
  arena_.Reset();
  decoder_->Forward(batch, kv_.pool(), arena_, logits_.row(0));
}

void ModelMemory::Copy(const BlockCopy& copy) {
  model_.device->CopyBlock(kv_.pool(), copy.from, copy.to);
}

void ModelMemory::Copy(const HostCopy& copy) {
  unsigned char* const host = host_blocks_.data() + copy.slot * kv_.block_bytes();
  if (copy.to_host) {
    model_.device->BlockToHost(kv_.pool(), copy.block, host);
  } else {
    model_.device->BlockFromHost(host, kv_.pool(), copy.block);
  }
}

void ModelMemory::WarmUp() {
  const char* disabled = std::getenv("ALLSPARK_DISABLE_WARMUP");
  if (disabled != nullptr && std::string(disabled) == "1") return;
  WarmUpPrefill();
  WarmUpDecodes();
  for (const auto& drafter : drafters_) drafter->WarmUp();
}

// The largest prefill: one chunk from position 0, sampled.
void ModelMemory::WarmUpPrefill() {
  const int64_t chunk = model_.sizes.chunk_tokens;
  const int64_t num_blocks = CeilDiv(chunk, model_.config.block_size);
  std::vector<int32_t> table(static_cast<size_t>(num_blocks));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  const std::vector<int32_t> tokens(static_cast<size_t>(chunk));
  std::vector<int32_t> positions(tokens.size());
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i);
  const BatchSequence prefill{.num_tokens = chunk, .block_table = table.data(), .logits_row = 0};
  Forward({.tokens = tokens.data(),
           .positions = positions.data(),
           .num_tokens = chunk,
           .sequences = &prefill,
           .num_sequences = 1,
           .num_logits_rows = 1});
}

// A full batch of decodes at position 0. They may share a block: nobody reads the result.
void ModelMemory::WarmUpDecodes() {
  const int64_t max_batch = model_.config.engine_max_batch;
  const std::vector<int32_t> zeros(static_cast<size_t>(max_batch));
  std::vector<int32_t> block_ids(zeros.size());
  std::vector<BatchSequence> sequences(zeros.size());
  std::vector<SamplingRow> rows(zeros.size());
  const SamplingParams sampling{.greedy = false, .top_k = 50, .top_p = 0.9f};
  for (int64_t i = 0; i < max_batch; ++i) {
    const auto slot = static_cast<size_t>(i);
    block_ids[slot] = static_cast<int32_t>(i % model_.sizes.num_blocks);
    sequences[slot] = {.token_begin = i,
                       .num_tokens = 1,
                       .block_table = &block_ids[slot],
                       .logits_row = static_cast<int32_t>(i)};
    rows[slot] = {.params = &sampling, .logits = logits_.row(i), .position = 1};
  }
  Forward({.tokens = zeros.data(),
           .positions = zeros.data(),
           .num_tokens = max_batch,
           .sequences = sequences.data(),
           .num_sequences = max_batch,
           .num_logits_rows = max_batch});
  sampler_->Sample(rows.data(), max_batch);
}

}  // namespace allspark
