#include "engine/model_instance.h"

#include <algorithm>
#include <new>
#include <string>
#include <system_error>

#include "base/clock.h"
#include "base/log.h"
#include "engine/end_waiter.h"
#include "weights/required_tensors.h"

namespace allspark {
namespace {

// Steps, and requests, that a trace keeps: 10 MB.
constexpr size_t kTraceCapacity = 1 << 16;

}  // namespace

ModelInstance::ModelInstance(const RuntimeConfig& config, std::unique_ptr<ModelReader> reader,
                             std::unique_ptr<ModelReader> draft_reader,
                             std::shared_ptr<Device> device,
                             std::shared_ptr<CompletionSetImpl> engine_set)
    : model_{.config = config,
             .reader = std::move(reader),
             .draft_reader = std::move(draft_reader),
             .device = std::move(device),
             .sizes = {}},
      engine_set_(std::move(engine_set)),
      loras_(config.lora_max_num),
      mailbox_(config, state_, statistics_) {}

Result<std::unique_ptr<ModelInstance>> ModelInstance::Create(
    const RuntimeConfig& config, std::unique_ptr<ModelReader> reader,
    std::unique_ptr<ModelReader> draft_reader, std::shared_ptr<Device> device,
    std::shared_ptr<CompletionSetImpl> engine_set) {
  const proto::DecoderSpec& spec = reader->spec();
  const std::string precision = ChoiceName(config.matmul_precision);
  const std::string type = DTypeName(weights::FloatDType(spec));
  if (!precision.empty() && precision != type) {
    return Status::InvalidArgument("matmul_precision is '" + precision + "', but " +
                                   reader->source() + " was serialised for " + type);
  }
  std::unique_ptr<ModelInstance> instance(
      new ModelInstance(config, std::move(reader), std::move(draft_reader), std::move(device),
                        std::move(engine_set)));
  InstalledModel& model = instance->model_;
  AS_ASSIGN_OR_RETURN(model.sizes, ModelSizes::Measure(config, *model.reader,
                                                       model.draft_reader.get(), *model.device));
  if (config.op_profiling) instance->op_profile_ = std::make_unique<OpProfile>();
  if (!config.trace_path.empty()) {
    instance->trace_ = std::make_unique<StepTrace>(config.model_name, kTraceCapacity);
    // A path that cannot be written is known now, not after a day.
    AS_RETURN_IF_ERROR(instance->WriteTrace(config.trace_path));
  }
  return instance;
}

ModelInstance::~ModelInstance() {
  if (step_thread_.joinable()) (void)Stop(StopMode::kCancel, -1);
}

Result<std::unique_ptr<StepLoop>> ModelInstance::MakeLoop() {
  auto loop = std::make_unique<StepLoop>(StepLoop::Context{.model = model_,
                                                           .mailbox = mailbox_,
                                                           .statistics = statistics_,
                                                           .trace = trace_.get(),
                                                           .op_profile = op_profile_.get(),
                                                           .hook = hook_,
                                                           .stat = [this] { return Stat(); }});
  try {
    AS_RETURN_IF_ERROR(loop->Start());
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return Status::Internal("start_model: warm-up of '" + model_.config.model_name +
                            "' failed: " + error.what());
  }
  return loop;
}

Status ModelInstance::IsDraining(const char* call) const {
  return Status::FailedPrecondition(std::string(call) + ": model '" + model_.config.model_name +
                                    "' is Running; its stop waits for the last requests");
}

Status ModelInstance::Start() {
  const RuntimeConfig& config = model_.config;
  const Lifecycle::Call call(lifecycle_);
  if (!call.has_entered()) return IsDraining("start_model");
  const ModelState state = state_.load();
  if (state != ModelState::kInitial && state != ModelState::kStop) {
    return Status::FailedPrecondition("start_model: model '" + config.model_name + "' is " +
                                      std::string(ModelStateName(state)) +
                                      "; it must be Initial or Stop");
  }
  const int64_t begin_us = SteadyNowUs();
  AS_ASSIGN_OR_RETURN(std::unique_ptr<StepLoop> loop, MakeLoop());
  try {
    step_thread_ = std::thread(&StepLoop::Run, loop.get());
  } catch (const std::system_error& error) {
    return Status::ResourceExhausted(std::string("start_model: no thread: ") + error.what());
  }
  loop_ = std::move(loop);  // Calls through the mailbox need it.
  mailbox_.Accept();        // Who sees the state may start requests.
  state_ = ModelState::kRunning;
  AS_LOG(kInfo) << "model '" << config.model_name
                << "' is running: " << model_.sizes.num_blocks * config.block_size
                << " tokens of KV cache (" << (loop_->kv_bytes() >> 20) << " MiB), batch "
                << config.engine_max_batch << ", chunk " << model_.sizes.chunk_tokens << ", "
                << model_.device->host_pool().num_threads() << " threads, "
                << model_.device->ops().name() << " kernels, started in "
                << (SteadyNowUs() - begin_us) / 1000 << " ms";
  return Status::Ok();
}

Status ModelInstance::Release() {
  const Lifecycle::Call call(lifecycle_);
  if (!call.has_entered()) return IsDraining("release_model");
  const ModelState state = state_.load();
  if (state == ModelState::kRunning || state == ModelState::kReleased) {
    return Status::FailedPrecondition("release_model: model '" + model_.config.model_name +
                                      "' is " + std::string(ModelStateName(state)) +
                                      "; it must be Initial or Stop");
  }
  state_ = ModelState::kReleased;
  return Status::Ok();
}

Status ModelInstance::Stop(StopMode mode, int64_t timeout_ms,
                           const std::function<bool()>& cancelled) {
  const Lifecycle::Call call(lifecycle_);
  if (!call.has_entered()) return JoinDrain(call, mode, timeout_ms, cancelled);
  const ModelState state = state_.load();
  if (state != ModelState::kRunning) {
    return Status::FailedPrecondition("stop_model: model '" + model_.config.model_name + "' is " +
                                      std::string(ModelStateName(state)) + "; it must be Running");
  }
  // Requests that wait for memory would wait for ever.
  if (mode == StopMode::kDrain) AS_RETURN_IF_ERROR(CheckMemory("stop_model with drain", true));
  mailbox_.Close(mode);
  if (mode == StopMode::kDrain) {
    lifecycle_.BeginDrain();
    mailbox_.AwaitDrain(timeout_ms, cancelled);
    lifecycle_.EndDrain();
  }
  step_thread_.join();
  loop_.reset();
  statistics_.SetUsage({});
  state_ = ModelState::kStop;
  if (trace_ != nullptr) WriteLastTrace();
  return Status::Ok();
}

Status ModelInstance::JoinDrain(const Lifecycle::Call& call, StopMode mode, int64_t timeout_ms,
                                const std::function<bool()>& cancelled) {
  // The drain asks this thread whether to go on, and cannot end before it has the answer.
  if (lifecycle_.DrainsHere()) {
    if (mode == StopMode::kDrain) return IsDraining("stop_model");
    mailbox_.CutDrainShort();
    return Status::Ok();
  }
  if (mode == StopMode::kDrain) {
    mailbox_.AwaitDrain(timeout_ms, cancelled);
  } else {
    mailbox_.CutDrainShort();
  }
  lifecycle_.Await(call.number());
  return Status::Ok();
}

// The stop succeeds even if the trace cannot be written.
void ModelInstance::WriteLastTrace() const {
  try {
    const Status written = WriteTrace(model_.config.trace_path);
    if (!written.ok()) {
      AS_LOG(kError) << written.message();
    }
  } catch (const std::bad_alloc&) {
    AS_LOG(kError) << "no memory to write the trace to " << model_.config.trace_path;
  }
}

Status ModelInstance::WriteTrace(const std::string& path) const {
  if (trace_ != nullptr) return trace_->Write(path);
  return Status::FailedPrecondition("trace_path of model '" + model_.config.model_name +
                                    "' is empty; it keeps no trace");
}

Result<std::string> ModelInstance::OpProfilingInfo() const {
  if (op_profile_ == nullptr) {
    return Status::FailedPrecondition("op_profiling of model '" + model_.config.model_name +
                                      "' is off; nothing is measured");
  }
  return ToText(*op_profile_, "model '" + model_.config.model_name + "', " +
                                  model_.device->ops().name() + " kernels, " +
                                  std::to_string(model_.device->host_pool().num_threads()) +
                                  " threads");
}

EngineStat ModelInstance::Stat() const {
  EngineStat stat;
  stat.model_name = model_.config.model_name;
  stat.kernel_table = model_.device->ops().name();
  stat.block_size = model_.config.block_size;
  stat.total_blocks = model_.sizes.num_blocks;
  statistics_.Report(stat, SteadyNowUs());
  const Mailbox::Counts counts = mailbox_.counts();
  stat.running_request = std::min(stat.running_request, counts.num_live);
  stat.pending_request = counts.num_live - stat.running_request;
  stat.blocked_request = counts.num_blocked;
  stat.output_tensor_bytes = counts.tensor_bytes;
  const AllocatorStats memory = model_.device->allocator()->Stats();
  stat.total_device_memory_pool_size = memory.pool_bytes;
  stat.used_device_memory_pool_size = memory.bytes_in_use;
  return stat;
}

Status ModelInstance::CheckMemory(const char* call, bool has_memory) const {
  const auto refusal = [&](const std::string& state) {
    return Status::FailedPrecondition(std::string(call) + ": model '" + model_.config.model_name +
                                      "' is " + state);
  };
  if (state_ != ModelState::kRunning) {
    return refusal(std::string(ModelStateName(state_.load())) + "; it must be Running");
  }
  if (loop_->has_memory() == has_memory) return Status::Ok();
  return refusal(has_memory ? "unloaded; load_device_mem comes first"
                            : "loaded; unload_device_mem comes first");
}

Status ModelInstance::UnloadMemory() {
  const Lifecycle::Call call(lifecycle_);
  if (!call.has_entered()) return IsDraining("unload_device_mem");
  AS_RETURN_IF_ERROR(CheckMemory("unload_device_mem", true));
  const auto unload = [this]() -> Result<int64_t> {
    loop_->UnloadMemory();
    return 0;
  };
  return mailbox_.Call("unload_device_mem", unload).status();
}

Status ModelInstance::LoadMemory() {
  const Lifecycle::Call call(lifecycle_);
  if (!call.has_entered()) return IsDraining("load_device_mem");
  AS_RETURN_IF_ERROR(CheckMemory("load_device_mem", false));
  const auto load = [this]() -> Result<int64_t> {
    AS_RETURN_IF_ERROR(loop_->LoadMemory());
    return 0;
  };
  return mailbox_.Call("load_device_mem", load).status();
}

Status ModelInstance::LoadLora(const std::string& lora_name, const LoraFile& file) {
  const RuntimeConfig& config = model_.config;
  if (state_ == ModelState::kReleased) {
    return Status::FailedPrecondition("load_lora: model '" + config.model_name + "' is Released");
  }
  // Before the work of packing, and again after it.
  AS_RETURN_IF_ERROR(loras_.Check(lora_name));
  AS_ASSIGN_OR_RETURN(const DecoderShape shape, MakeDecoderShape(spec(), config.cache_mode));
  AS_ASSIGN_OR_RETURN(
      std::shared_ptr<const LoraAdapter> adapter,
      LoraAdapter::Create(file, *model_.reader, shape, config.lora_max_rank, *model_.device));
  const int64_t bytes = adapter->bytes(), rank = adapter->rank();
  AS_RETURN_IF_ERROR(loras_.Add(lora_name, std::move(adapter)));
  AS_LOG(kInfo) << "model '" << config.model_name << "' has loaded adapter '" << lora_name
                << "': rank " << rank << ", " << (bytes >> 10) << " KiB, from " << file.source();
  return Status::Ok();
}

Status ModelInstance::UnloadLora(const std::string& lora_name) {
  AS_ASSIGN_OR_RETURN(const uint64_t salt, loras_.Remove(lora_name));
  // Nobody can name its pinned prefixes any more. A model that does not run has no pins; the text
  // of its refusal may find no memory.
  try {
    (void)mailbox_.Call("unload_lora",
                        [&] { return loop_->CallPrefixCache(PrefixOp::kUnpinAll, {}, salt); });
  } catch (const std::bad_alloc&) {
  }
  return Status::Ok();
}

Result<StartedRequest> ModelInstance::Submit(uint64_t request_id,
                                             std::span<const int64_t> prompt_ids,
                                             const GenerationConfig& generation,
                                             std::shared_ptr<TokenMask> token_mask,
                                             const std::function<bool()>& cancelled) {
  AS_RETURN_IF_ERROR(model_.CheckWeights());
  AS_ASSIGN_OR_RETURN(const std::shared_ptr<Request> request,
                      Request::Create(request_id, prompt_ids, generation, model_.sizes.limits,
                                      engine_set_, std::move(token_mask)));
  AS_ASSIGN_OR_RETURN(std::shared_ptr<const LoadedLora> lora, loras_.Find(generation.lora_name));
  request->UseLora(std::move(lora));
  StartedRequest started{RequestHandle{request_id}, request->queue};
  if (request->group != nullptr) {
    for (const Request* other : request->group->returned().subspan(1)) {
      started.next_best.push_back({RequestHandle{other->spec.request_id}, other->queue});
    }
  }
  AS_RETURN_IF_ERROR(mailbox_.Submit(request, cancelled));
  return started;
}

Result<int64_t> ModelInstance::CallPrefixCache(PrefixOp op, std::span<const int64_t> prompt_ids,
                                               const std::string& lora_name) {
  if (!model_.config.enable_prefix_cache) {
    return Status::FailedPrecondition("enable_prefix_cache of model '" + model_.config.model_name +
                                      "' is false; it has no prefix cache");
  }
  AS_RETURN_IF_ERROR(CheckTokenIds(prompt_ids, model_.sizes.limits.vocab_size));
  AS_ASSIGN_OR_RETURN(const std::shared_ptr<const LoadedLora> lora, loras_.Find(lora_name));
  const uint64_t salt = lora != nullptr ? lora->cache_salt : 0;
  const std::vector<int32_t> tokens(prompt_ids.begin(), prompt_ids.end());
  return mailbox_.Call("a call on the prefix cache",
                       [&] { return loop_->CallPrefixCache(op, tokens, salt); });
}

Status ModelInstance::StopRequest(RequestHandle handle, FinishReason reason) {
  if (reason == FinishReason::kCancelled || reason == FinishReason::kStop) {
    return mailbox_.Stop(handle, reason);
  }
  return Status::InvalidArgument("stop_request: reason is " +
                                 std::string(FinishReasonName(reason)) +
                                 "; it must be cancelled or stop");
}

Status ModelInstance::SyncRequests(std::span<const RequestHandle> handles, int64_t timeout_ms,
                                   const std::function<bool()>& cancelled) {
  const EndWaiter waiter(timeout_ms, cancelled);
  Status first_failure;
  for (const RequestHandle handle : handles) {
    Result<std::shared_ptr<ResultQueueImpl>> queue = mailbox_.QueueOf(handle);
    const Status status = queue.ok() ? waiter.Await(**queue) : queue.status();
    if (status.code() == StatusCode::kCancelled) return status;
    if (first_failure.ok()) first_failure = status;
  }
  return first_failure;
}

Status ModelInstance::SyncAll(int64_t timeout_ms, const std::function<bool()>& cancelled) {
  const EndWaiter waiter(timeout_ms, cancelled);
  for (const auto& queue : mailbox_.Queues()) AS_RETURN_IF_ERROR(waiter.Await(*queue));
  return Status::Ok();
}

}  // namespace allspark
