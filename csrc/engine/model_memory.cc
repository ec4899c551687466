// ModelInstance: the device memory of a model and its adapters, and the warm-up, which runs the
// step's code on made-up batches.

#include <algorithm>
#include <cstdlib>
#include <string>

#include "base/int_math.h"
#include "base/log.h"
#include "engine/model_instance.h"

namespace allspark {
namespace {

// A step with decodes and prefill has a quarter of the rows of a chunk: a stream then waits a
// quarter as long for the prompts of others, whose tokens cost no more (benchmarks/notes.md).
constexpr int64_t kRowShareBesideDecodes = 4;

}  // namespace

Result<int64_t> ModelInstance::AddDraftModel(Running& running) const {
  if (draft_reader_ == nullptr) return 0;
  Result<std::unique_ptr<DraftModel>> model = DraftModel::Create(
      *draft_reader_, DraftOptions(), *device_.kernels, device_.pool.get(), device_.allocator.get(),
      {running.arena, running.logits_buffer, *running.sampler});
  if (!model.ok()) return model.status();
  const int64_t arena_bytes = (*model)->arena_bytes();
  running.drafters.push_back(std::move(*model));
  return arena_bytes;
}

Status ModelInstance::TakeMemory(Running& running) const {
  Allocator* allocator = device_.allocator.get();
  Result<std::unique_ptr<Decoder>> decoder =
      Decoder::Create(*reader_, decoder_options_, *device_.kernels, device_.pool.get(), allocator);
  if (!decoder.ok()) return decoder.status();
  running.decoder = std::move(*decoder);

  Result<Buffer> kv =
      Buffer::Create(allocator, static_cast<size_t>(num_blocks_ * running.decoder->block_bytes()));
  if (!kv.ok()) return kv.status();
  running.kv_buffer = std::move(*kv);
  running.kv = {static_cast<unsigned char*>(running.kv_buffer.data()), num_blocks_};
  running.host_blocks.resize(
      static_cast<size_t>(num_host_blocks_ * running.decoder->block_bytes()));

  running.sampler =
      std::make_unique<Sampler>(limits_.vocab_size, *device_.kernels, device_.pool.get());
  running.drafters.push_back(std::make_unique<PromptLookupDrafter>());
  Result<int64_t> draft_arena_bytes = AddDraftModel(running);
  if (!draft_arena_bytes.ok()) return draft_arena_bytes.status();

  const int64_t arena_bytes = std::max(running.decoder->arena_bytes(), *draft_arena_bytes);
  Result<Buffer> arena = Buffer::Create(allocator, static_cast<size_t>(arena_bytes));
  if (!arena.ok()) return arena.status();
  running.arena = StepArena(std::move(*arena));
  Result<Buffer> logits = Buffer::Create(
      allocator,
      static_cast<size_t>(decoder_options_.max_logits_rows * limits_.vocab_size) * sizeof(float));
  if (!logits.ok()) return logits.status();
  running.logits_buffer = std::move(*logits);
  return Status::Ok();
}

Status ModelInstance::CheckWeights() const {
  for (const ModelReader* reader : {reader_.get(), draft_reader_.get()}) {
    if (reader != nullptr) AS_RETURN_IF_ERROR(reader->CheckViews());
  }
  return Status::Ok();
}

// Drafters and decoder first: they refer to the rest.
void ModelInstance::GiveMemoryBack(Running& running) {
  running.has_memory = false;
  running.drafters.clear();
  running.decoder.reset();
  running.sampler.reset();
  running.kv = {};
  running.kv_buffer = Buffer();
  std::vector<unsigned char>().swap(running.host_blocks);
  running.arena = StepArena();
  running.logits_buffer = Buffer();
}

Result<std::unique_ptr<ModelInstance::Running>> ModelInstance::MakeRunning() const {
  auto running = std::make_unique<Running>(config_.model_name);
  AS_RETURN_IF_ERROR(TakeMemory(*running));
  running->scheduler = std::make_unique<Scheduler>(SchedulerConfig{
      .max_batch = config_.engine_max_batch,
      .chunk_tokens = chunk_tokens_,
      .max_rows_beside_decodes = CeilDiv(chunk_tokens_, kRowShareBesideDecodes),
      .block_size = config_.cache_span_size,
      .num_blocks = num_blocks_,
      .max_draft_rows = config_.max_draft_rows,
      .draft_row_cost = row_cost_,
      .enable_prefix_cache = config_.enable_prefix_cache,
      .prefix_cache_ttl_us = config_.prefix_cache_ttl * 1000000,
      .max_pinned_blocks =
          num_blocks_ - CeilDiv(config_.engine_max_length, config_.cache_span_size),
      .num_host_blocks = num_host_blocks_,
      .interrupts = config_.interrupt_on_cache_exhaustion,
  });
  const auto max_tokens = static_cast<size_t>(decoder_options_.max_tokens);
  const auto max_batch = static_cast<size_t>(config_.engine_max_batch);
  running->tokens.resize(max_tokens);
  running->positions.resize(max_tokens);
  running->chunks.reserve(max_batch);
  running->sequences.reserve(max_batch);
  running->rows.reserve(max_batch);
  running->drafting.reserve(max_batch);
  running->sampled.reserve(max_batch);
  running->prompts.reserve(max_batch);
  running->outputs =
      std::make_unique<StepOutputs>(config_.engine_max_batch, decoder_options_.max_tokens,
                                    decoder_options_.max_logits_rows, *device_.kernels);
  running->changed.reserve(max_batch);
  running->ended.reserve(max_batch);
  return running;
}

Status ModelInstance::LoadLora(const std::string& lora_name, const LoraFile& file) {
  if (state_ == ModelState::kReleased) {
    return Status::FailedPrecondition("load_lora: model '" + config_.model_name + "' is Released");
  }
  // Before the work of packing, and again after it.
  AS_RETURN_IF_ERROR(loras_.Check(lora_name));
  Result<DecoderShape> shape = MakeDecoderShape(reader_->spec(), config_.cache_mode);
  if (!shape.ok()) return shape.status();
  Result<std::shared_ptr<const LoraAdapter>> adapter = LoraAdapter::Create(
      file, *reader_, *shape, config_.lora_max_rank, *device_.kernels, device_.allocator.get());
  if (!adapter.ok()) return adapter.status();
  const int64_t bytes = (*adapter)->bytes(), rank = (*adapter)->rank();
  AS_RETURN_IF_ERROR(loras_.Add(lora_name, std::move(*adapter)));
  AS_LOG(kInfo) << "model '" << config_.model_name << "' has loaded adapter '" << lora_name
                << "': rank " << rank << ", " << (bytes >> 10) << " KiB, from " << file.source();
  return Status::Ok();
}

void ModelInstance::WarmUp(Running& running) const {
  const char* disabled = std::getenv("ALLSPARK_DISABLE_WARMUP");
  if (disabled != nullptr && std::string(disabled) == "1") return;
  auto* logits = static_cast<float*>(running.logits_buffer.data());
  // The largest prefill: one chunk from position 0, sampled.
  const int64_t chunk = chunk_tokens_;
  const int64_t blocks = CeilDiv(chunk, config_.cache_span_size);
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  for (int64_t i = 0; i < blocks; ++i) table[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  for (int64_t i = 0; i < chunk; ++i) {
    running.tokens[static_cast<size_t>(i)] = 0;
    running.positions[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  }
  BatchSequence prefill{.num_tokens = chunk, .block_table = table.data(), .logits_row = 0};
  Batch batch{.tokens = running.tokens.data(),
              .positions = running.positions.data(),
              .num_tokens = chunk,
              .sequences = &prefill,
              .num_sequences = 1,
              .num_logits_rows = 1};
  running.arena.Reset();
  running.decoder->Forward(batch, running.kv, running.arena, logits);

  // A full batch of decodes at position 0. They may share a block: nobody reads the result.
  const int64_t max_batch = config_.engine_max_batch;
  std::vector<int32_t> block_ids(static_cast<size_t>(max_batch));
  std::vector<SamplingRow> rows(static_cast<size_t>(max_batch));
  const SamplingParams sampling{.greedy = false, .top_k = 50, .top_p = 0.9f};
  running.sequences.clear();
  for (int64_t i = 0; i < max_batch; ++i) {
    const auto slot = static_cast<size_t>(i);
    running.tokens[slot] = 0;
    running.positions[slot] = 0;
    block_ids[slot] = static_cast<int32_t>(i % num_blocks_);
    running.sequences.push_back({.token_begin = i,
                                 .num_tokens = 1,
                                 .block_table = &block_ids[slot],
                                 .logits_row = static_cast<int32_t>(i)});
    rows[slot] = {.params = &sampling, .logits = logits + i * limits_.vocab_size, .position = 1};
  }
  batch.num_tokens = batch.num_sequences = batch.num_logits_rows = max_batch;
  batch.sequences = running.sequences.data();
  running.arena.Reset();
  running.decoder->Forward(batch, running.kv, running.arena, logits);
  running.sampler->Sample(rows.data(), max_batch);
  for (const auto& drafter : running.drafters) drafter->WarmUp();
}

}  // namespace allspark
