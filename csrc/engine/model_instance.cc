#include "engine/model_instance.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>

#include "base/check.h"
#include "base/clock.h"
#include "base/int_math.h"
#include "base/log.h"
#include "model/attention.h"
#include "model/decoder_shape.h"

namespace allspark {
namespace {

constexpr int64_t kDefaultChunkTokens = 512;
// Rows of logits beside those that are sampled, for prompt tokens whose logits somebody wants: a
// slice of so many costs a token what a whole chunk in one go would (docs/performance.md).
constexpr int64_t kLogitsSliceRows = 32;
// Beside decodes a step takes a fraction of the chunk: a stream then waits a quarter as long for
// the prompts of others, and a prompt's tokens cost no more (docs/performance.md).
constexpr int64_t kChunkShareBesideDecodes = 4;

const char* ComputeTypeName(proto::ComputeType type) {
  return type == proto::COMPUTE_BFLOAT16 ? "bfloat16" : "float32";
}

// Of all tensors: what a step of one token reads, about.
struct WeightTotals {
  double bytes = 0, elements = 0;
};
WeightTotals TotalsOf(const ModelReader& reader) {
  WeightTotals totals;
  for (const proto::TensorRecord& tensor : reader.file().tensors()) {
    double size = 1;
    for (int64_t extent : tensor.shape()) size *= static_cast<double>(extent);
    totals.bytes += static_cast<double>(tensor.bytes());
    totals.elements += size;
  }
  return totals;
}

// What each row after the first adds to a step, of what a step of one row takes: measured at the
// 0.5B shape 3 % with 16 bits a weight, 5 % with 8 and 9 % with 4, where reading the weights is
// done sooner.
double RowCost(const WeightTotals& weights) {
  return std::max(0.03, 0.5 * weights.elements / (8 * weights.bytes));
}

std::string Mib(int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

ModelInstance::ModelInstance(const RuntimeConfig& config, std::unique_ptr<ModelReader> reader,
                             DeviceContext device, std::shared_ptr<CompletionSetImpl> engine_set)
    : config_(config),
      reader_(std::move(reader)),
      device_(std::move(device)),
      engine_set_(std::move(engine_set)) {}

Result<std::unique_ptr<ModelInstance>> ModelInstance::Create(
    const RuntimeConfig& config, std::unique_ptr<ModelReader> reader,
    std::unique_ptr<ModelReader> draft_reader, DeviceContext device,
    std::shared_ptr<CompletionSetImpl> engine_set) {
  const proto::DecoderSpec& spec = reader->spec();
  if ((config.matmul_precision == "float32" || config.matmul_precision == "bfloat16") &&
      config.matmul_precision != ComputeTypeName(spec.compute_type())) {
    return Status::InvalidArgument("matmul_precision is '" + config.matmul_precision + "', but " +
                                   reader->source() + " was serialised for " +
                                   ComputeTypeName(spec.compute_type()));
  }
  std::unique_ptr<ModelInstance> instance(
      new ModelInstance(config, std::move(reader), std::move(device), std::move(engine_set)));
  instance->draft_reader_ = std::move(draft_reader);
  AS_RETURN_IF_ERROR(instance->CheckDraftModel());
  AS_RETURN_IF_ERROR(instance->SizePool());
  return instance;
}

ModelInstance::~ModelInstance() {
  if (step_thread_.joinable()) (void)Stop(StopMode::kCancel, -1);
}

Status ModelInstance::CheckDraftModel() const {
  if (draft_reader_ == nullptr) return Status::Ok();
  const int64_t vocab_size = draft_reader_->spec().vocab_size();
  if (vocab_size == reader_->spec().vocab_size()) return Status::Ok();
  return Status::InvalidArgument("draft_model is '" + config_.draft_model +
                                 "', whose vocabulary has " + std::to_string(vocab_size) +
                                 " tokens; it must be that of model '" + config_.model_name +
                                 "', which has " + std::to_string(reader_->spec().vocab_size()));
}

Result<int64_t> ModelInstance::BlockBytes() const {
  int64_t bytes = 0;
  for (const ModelReader* reader : {reader_.get(), draft_reader_.get()}) {
    if (reader == nullptr) continue;
    Result<DecoderShape> shape = MakeDecoderShape(reader->spec(), config_.cache_mode);
    if (!shape.ok()) return shape.status();
    bytes += KvBlockBytes(*shape, config_.cache_span_size);
  }
  return bytes;
}

Status ModelInstance::SizePool() {
  const int64_t block_size = config_.cache_span_size;
  Result<int64_t> bytes = BlockBytes();
  if (!bytes.ok()) return bytes.status();
  const int64_t block_bytes = *bytes;
  const int64_t blocks_per_request = CeilDiv(config_.engine_max_length, block_size);
  const AllocatorStats stats = device_.allocator->Stats();
  const int64_t region_free =
      stats.largest_free_bytes > 0 ? stats.largest_free_bytes : AvailableMemoryBytes();
  if (config_.cache_span_num_init > 0) {
    num_blocks_ = config_.cache_span_num_init;
  } else {
    const int64_t budget = std::min(AvailableMemoryBytes() / 2, region_free);
    num_blocks_ = std::min(config_.engine_max_batch * blocks_per_request, budget / block_bytes);
  }
  if (num_blocks_ < blocks_per_request) {
    return Status::ResourceExhausted(
        "the KV cache pool can have " + std::to_string(num_blocks_) + " blocks of " +
        std::to_string(block_size) + " tokens, but one request of engine_max_length " +
        std::to_string(config_.engine_max_length) + " needs " + std::to_string(blocks_per_request) +
        " (" + Mib(blocks_per_request * block_bytes) +
        "); lower engine_max_length or give more memory");
  }
  if (num_blocks_ * block_bytes > region_free) {
    return Status::ResourceExhausted("cache_span_num_init is " + std::to_string(num_blocks_) +
                                     " blocks, " + Mib(num_blocks_ * block_bytes) +
                                     "; the device's memory region has " + Mib(region_free) +
                                     " free (BFC_MEM_RATIO and BFC_LEFTOVER_MB set its size)");
  }
  chunk_tokens_ = config_.engine_max_prefill_length > 0 ? config_.engine_max_prefill_length
                                                        : kDefaultChunkTokens;
  chunk_tokens_ = std::min(chunk_tokens_, config_.engine_max_length);
  decoder_options_.max_length = config_.engine_max_length;
  decoder_options_.max_logits_rows =
      std::max(config_.engine_max_batch, config_.max_draft_rows) + kLogitsSliceRows;
  decoder_options_.max_tokens =
      std::max(chunk_tokens_ + config_.engine_max_batch, decoder_options_.max_logits_rows);
  decoder_options_.block_size = block_size;
  decoder_options_.cache_mode = config_.cache_mode;
  limits_ = {.vocab_size = reader_->spec().vocab_size(),
             .hidden_size = reader_->spec().hidden_size(),
             .engine_max_length = config_.engine_max_length,
             .engine_max_batch = config_.engine_max_batch,
             .block_size = block_size,
             .num_draft_tokens = draft_reader_ != nullptr ? config_.num_draft_tokens : 0};
  return Status::Ok();
}

Result<int64_t> ModelInstance::AddDraftModel(Running& running) const {
  if (draft_reader_ == nullptr) return 0;
  DraftModelOptions options;
  options.decoder = decoder_options_;
  options.decoder.max_logits_rows = config_.engine_max_batch;
  options.num_blocks = num_blocks_;
  options.num_tokens = config_.num_draft_tokens;
  options.chunk_tokens = chunk_tokens_;
  options.cost = TotalsOf(*draft_reader_).bytes / TotalsOf(*reader_).bytes;
  Result<std::unique_ptr<DraftModel>> model = DraftModel::Create(
      *draft_reader_, options, *device_.kernels, device_.pool.get(), device_.allocator.get(),
      {running.arena, running.logits_buffer, *running.sampler});
  if (!model.ok()) return model.status();
  const int64_t arena_bytes = (*model)->arena_bytes();
  running.drafters.push_back(std::move(*model));
  return arena_bytes;
}

Result<std::unique_ptr<ModelInstance::Running>> ModelInstance::MakeRunning() const {
  auto running = std::make_unique<Running>();
  Allocator* allocator = device_.allocator.get();
  Result<std::unique_ptr<Decoder>> decoder =
      Decoder::Create(*reader_, decoder_options_, *device_.kernels, device_.pool.get(), allocator);
  if (!decoder.ok()) return decoder.status();
  running->decoder = std::move(*decoder);

  Result<Buffer> kv =
      Buffer::Create(allocator, static_cast<size_t>(num_blocks_ * running->decoder->block_bytes()));
  if (!kv.ok()) return kv.status();
  running->kv_buffer = std::move(*kv);
  running->kv = {static_cast<unsigned char*>(running->kv_buffer.data()), num_blocks_};

  running->sampler =
      std::make_unique<Sampler>(limits_.vocab_size, *device_.kernels, device_.pool.get());
  running->drafters.push_back(std::make_unique<PromptLookupDrafter>());
  Result<int64_t> draft_arena_bytes = AddDraftModel(*running);
  if (!draft_arena_bytes.ok()) return draft_arena_bytes.status();

  const int64_t arena_bytes = std::max(running->decoder->arena_bytes(), *draft_arena_bytes);
  Result<Buffer> arena = Buffer::Create(allocator, static_cast<size_t>(arena_bytes));
  if (!arena.ok()) return arena.status();
  running->arena = StepArena(std::move(*arena));
  Result<Buffer> logits = Buffer::Create(
      allocator,
      static_cast<size_t>(decoder_options_.max_logits_rows * limits_.vocab_size) * sizeof(float));
  if (!logits.ok()) return logits.status();
  running->logits_buffer = std::move(*logits);

  running->scheduler = std::make_unique<Scheduler>(SchedulerConfig{
      .max_batch = config_.engine_max_batch,
      .chunk_tokens = chunk_tokens_,
      .chunk_tokens_beside_decodes = CeilDiv(chunk_tokens_, kChunkShareBesideDecodes),
      .block_size = config_.cache_span_size,
      .num_blocks = num_blocks_,
      .max_draft_rows = config_.max_draft_rows,
      .draft_row_cost = RowCost(TotalsOf(*reader_)),
      .enable_prefix_cache = config_.enable_prefix_cache,
      .prefix_cache_ttl_us = config_.prefix_cache_ttl * 1000000,
      .max_pinned_blocks =
          num_blocks_ - CeilDiv(config_.engine_max_length, config_.cache_span_size),
  });
  const auto max_tokens = static_cast<size_t>(decoder_options_.max_tokens);
  const auto max_batch = static_cast<size_t>(config_.engine_max_batch);
  running->tokens.resize(max_tokens);
  running->positions.resize(max_tokens);
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

Status ModelInstance::Start() {
  std::lock_guard lifecycle(lifecycle_mutex_);
  const ModelState state = state_.load();
  if (state != ModelState::kInitial && state != ModelState::kStop) {
    return Status::FailedPrecondition("start_model: model '" + config_.model_name + "' is " +
                                      std::string(ModelStateName(state)) +
                                      "; it must be Initial or Stop");
  }
  const int64_t begin_us = SteadyNowUs();
  try {
    Result<std::unique_ptr<Running>> running = MakeRunning();
    if (!running.ok()) return running.status();
    WarmUp(**running);
    running_ = std::move(*running);
  } catch (const std::exception& error) {
    return Status::Internal("start_model: warm-up of '" + config_.model_name +
                            "' failed: " + error.what());
  }
  {
    std::lock_guard lock(mutex_);
    accepting_ = true;
    stopping_ = false;
    loop_running_ = true;
  }
  try {
    step_thread_ = std::thread([this] { StepLoop(); });
  } catch (const std::system_error& error) {
    std::lock_guard lock(mutex_);
    accepting_ = loop_running_ = false;
    running_.reset();
    return Status::ResourceExhausted(std::string("start_model: no thread: ") + error.what());
  }
  state_ = ModelState::kRunning;
  AS_LOG(kInfo) << "model '" << config_.model_name
                << "' is running: " << num_blocks_ * config_.cache_span_size
                << " tokens of KV cache (" << Mib(static_cast<int64_t>(running_->kv_buffer.bytes()))
                << "), batch " << config_.engine_max_batch << ", chunk " << chunk_tokens_ << ", "
                << device_.pool->num_threads() << " threads, " << device_.kernels->name
                << " kernels, started in " << (SteadyNowUs() - begin_us) / 1000 << " ms";
  return Status::Ok();
}

Status ModelInstance::Release() {
  std::lock_guard lifecycle(lifecycle_mutex_);
  if (state_ == ModelState::kRunning) {
    return Status::FailedPrecondition("release_model: model '" + config_.model_name +
                                      "' is Running; stop it first");
  }
  state_ = ModelState::kReleased;
  return Status::Ok();
}

bool ModelInstance::CutDrainShort() {
  std::lock_guard lock(mutex_);
  if (!stopping_ || !loop_running_) return false;
  stop_mode_ = StopMode::kCancel;
  mail_.notify_all();
  return true;
}

Status ModelInstance::Stop(StopMode mode, int64_t timeout_ms) {
  const bool cut_short = mode == StopMode::kCancel && CutDrainShort();
  std::lock_guard lifecycle(lifecycle_mutex_);
  // Another thread's drain has ended meanwhile, and this call was part of it.
  if (cut_short && state_ == ModelState::kStop) return Status::Ok();
  const ModelState state = state_.load();
  if (state != ModelState::kRunning) {
    return Status::FailedPrecondition("stop_model: model '" + config_.model_name + "' is " +
                                      std::string(ModelStateName(state)) + "; it must be Running");
  }
  {
    std::unique_lock lock(mutex_);
    accepting_ = false;
    stopping_ = true;
    stop_mode_ = mode;
    mail_.notify_all();
    const auto ended = [this] { return !loop_running_; };
    if (mode == StopMode::kDrain && timeout_ms >= 0 &&
        !loop_ended_.wait_for(lock, std::chrono::milliseconds(timeout_ms), ended)) {
      stop_mode_ = StopMode::kCancel;
      mail_.notify_all();
    }
  }
  step_thread_.join();
  running_.reset();
  counters_.used_blocks = counters_.cached_blocks = counters_.running = 0;
  state_ = ModelState::kStop;
  return Status::Ok();
}

Result<StartedRequest> ModelInstance::Submit(uint64_t request_id,
                                             std::span<const int64_t> prompt_ids,
                                             const GenerationConfig& generation,
                                             std::shared_ptr<TokenMask> token_mask) {
  Result<std::shared_ptr<Request>> created = Request::Create(
      request_id, prompt_ids, generation, limits_, engine_set_, std::move(token_mask));
  if (!created.ok()) return created.status();
  std::shared_ptr<Request>& request = *created;
  std::lock_guard lock(mutex_);
  AS_RETURN_IF_ERROR(CheckAcceptingLocked("a request"));
  const int64_t num_waiting = num_live_ - config_.engine_max_batch;
  if (config_.max_waiting_requests > 0 && num_waiting >= config_.max_waiting_requests) {
    return Status::RequestDenied(std::to_string(num_waiting) +
                                 " requests are waiting; max_waiting_requests is " +
                                 std::to_string(config_.max_waiting_requests));
  }
  StartedRequest started{RequestHandle{request_id}, request->queue};
  requests_.emplace(request_id, request);
  if (request->group != nullptr) {
    for (const Request* other : request->group->returned().subspan(1)) {
      started.next_best.push_back({RequestHandle{other->request_id}, other->queue});
      requests_.emplace(other->request_id, request);
    }
  }
  request->self = request;
  (new_tail_ != nullptr ? new_tail_->next_new : new_head_) = request.get();
  new_tail_ = request.get();
  num_live_ += request->num_live();
  mail_.notify_one();
  return started;
}

Status ModelInstance::CheckAcceptingLocked(const char* what) const {
  if (accepting_) return Status::Ok();
  if (stopping_ && loop_running_) {
    return Status::RequestDenied("model '" + config_.model_name +
                                 "' is stopping and takes no requests");
  }
  return Status::FailedPrecondition("model '" + config_.model_name + "' is " +
                                    std::string(ModelStateName(state_.load())) + "; " + what +
                                    " needs it Running");
}

Result<std::shared_ptr<Request>> ModelInstance::Find(RequestHandle handle) const {
  const auto it = requests_.find(handle.id);
  if (it == requests_.end()) {
    return Status(StatusCode::kNotFound, AsStatus::kIllegalRequestId,
                  "model '" + config_.model_name + "' has no request " + std::to_string(handle.id) +
                      "; it was released, or is another model's");
  }
  return it->second;
}

void ModelInstance::PostStopLocked(const std::shared_ptr<Request>& request) {
  if (request->ended || request->stop_self != nullptr) return;
  request->stop_self = request;
  request->next_stop = stop_head_;
  stop_head_ = request.get();
  mail_.notify_one();
}

void ModelInstance::DropStops(Request* head) {
  while (head != nullptr) {
    Request* next = head->next_stop;
    head->stop_self.reset();  // may be the last reference
    head = next;
  }
}

Status ModelInstance::StopRequest(RequestHandle handle) {
  std::lock_guard lock(mutex_);
  Result<std::shared_ptr<Request>> request = Find(handle);
  if (!request.ok()) return request.status();
  PostStopLocked(*request);
  return Status::Ok();
}

Status ModelInstance::ReleaseRequest(RequestHandle handle) {
  std::shared_ptr<Request> released;  // dies after the lock
  std::lock_guard lock(mutex_);
  Result<std::shared_ptr<Request>> request = Find(handle);
  if (!request.ok()) return request.status();
  released = std::move(*request);
  PostStopLocked(released);
  requests_.erase(handle.id);
  return Status::Ok();
}

Status ModelInstance::SyncRequest(RequestHandle handle, int64_t timeout_ms) {
  std::shared_ptr<ResultQueueImpl> queue;
  {
    std::lock_guard lock(mutex_);
    Result<std::shared_ptr<Request>> request = Find(handle);
    if (!request.ok()) return request.status();
    queue = (*request)->queue;
  }
  if (queue->WaitTerminal(timeout_ms)) return Status::Ok();
  return Status::DeadlineExceeded("sync_request: request " + std::to_string(handle.id) +
                                  " has not ended within " + std::to_string(timeout_ms) + " ms");
}

Status ModelInstance::SyncAll(int64_t timeout_ms) {
  std::vector<std::shared_ptr<ResultQueueImpl>> queues;
  {
    std::lock_guard lock(mutex_);
    queues.reserve(requests_.size());
    for (const auto& [id, request] : requests_) queues.push_back(request->queue);
  }
  const int64_t deadline_us = SteadyNowUs() + timeout_ms * 1000;
  for (const auto& queue : queues) {
    const int64_t left_ms =
        timeout_ms < 0 ? -1 : std::max<int64_t>(0, (deadline_us - SteadyNowUs()) / 1000);
    if (!queue->WaitTerminal(left_ms)) {
      return Status::DeadlineExceeded(
          "sync_request: request " + std::to_string(queue->request_id()) +
          " has not ended within " + std::to_string(timeout_ms) + " ms");
    }
  }
  return Status::Ok();
}

EngineStat ModelInstance::Stat() const {
  EngineStat stat;
  stat.model_name = config_.model_name;
  stat.kernel_table = device_.kernels->name;
  stat.span_size = config_.cache_span_size;
  stat.total_span = num_blocks_;
  stat.used_span = counters_.used_blocks.load();
  stat.cached_span = counters_.cached_blocks.load();
  stat.free_span = stat.total_span - stat.used_span;
  stat.total_token = stat.total_span * stat.span_size;
  stat.free_token = stat.free_span * stat.span_size;
  stat.token_usage_percentage =
      100.0 * static_cast<double>(stat.used_span) / static_cast<double>(stat.total_span);
  {
    std::lock_guard lock(mutex_);
    stat.running_request = std::min(counters_.running.load(), num_live_);
    stat.pending_request = num_live_ - stat.running_request;
  }
  const AllocatorStats memory = device_.allocator->Stats();
  stat.total_device_memory_pool_size = memory.pool_bytes;
  stat.used_device_memory_pool_size = memory.bytes_in_use;
  stat.total_generated_token = counters_.generated.load();
  stat.total_prefill_token = counters_.prefilled.load();
  stat.prefix_cache_hit_token = counters_.prefix_hits.load();
  stat.prefix_cache_miss_token = stat.total_prefill_token;
  if (const int64_t looked_up = stat.prefix_cache_hit_token + stat.prefix_cache_miss_token;
      looked_up > 0) {
    stat.prefix_cache_hit_rate =
        static_cast<double>(stat.prefix_cache_hit_token) / static_cast<double>(looked_up);
    stat.prefix_cache_miss_rate = 1 - stat.prefix_cache_hit_rate;
  }
  // A window that nobody has closed for two seconds belongs to the past: nothing runs.
  if (SteadyNowUs() - counters_.window_begin_us.load() < 2000000) {
    stat.generate_token_persec = counters_.generated_per_second.load();
    stat.process_token_persec = counters_.prefilled_per_second.load();
  }
  stat.num_preemptions = counters_.preemptions.load();
  stat.num_steps = counters_.steps.load();
  stat.total_draft_token = counters_.drafted.load();
  stat.total_accepted_draft_token = counters_.accepted.load();
  return stat;
}

}  // namespace allspark
