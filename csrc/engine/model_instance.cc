#include "engine/model_instance.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <system_error>

#include "base/clock.h"
#include "base/log.h"

namespace allspark {
namespace {

// Steps, and requests, that a trace keeps: 10 MB.
constexpr size_t kTraceCapacity = 1 << 16;

const char* ComputeTypeName(proto::ComputeType type) {
  return type == proto::COMPUTE_BFLOAT16 ? "bfloat16" : "float32";
}

}  // namespace

ModelInstance::ModelInstance(const RuntimeConfig& config, std::unique_ptr<ModelReader> reader,
                             DeviceContext device, std::shared_ptr<CompletionSetImpl> engine_set)
    : config_(config),
      reader_(std::move(reader)),
      device_(std::move(device)),
      engine_set_(std::move(engine_set)),
      loras_(config.lora_max_num),
      admission_(config) {}

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
  AS_RETURN_IF_ERROR(instance->SizeUp());
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
    AS_RETURN_IF_ERROR(CheckWeights());
    running_ = std::move(*running);
  } catch (const std::bad_alloc&) {
    throw;
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
  const auto undo = [this] {
    std::lock_guard lock(mutex_);
    accepting_ = loop_running_ = false;
    running_.reset();
  };
  try {
    step_thread_ = std::thread([this] { StepLoop(); });
  } catch (const std::bad_alloc&) {
    undo();
    throw;
  } catch (const std::system_error& error) {
    undo();
    return Status::ResourceExhausted(std::string("start_model: no thread: ") + error.what());
  }
  state_ = ModelState::kRunning;
  AS_LOG(kInfo) << "model '" << config_.model_name
                << "' is running: " << num_blocks_ * config_.cache_span_size
                << " tokens of KV cache (" << (running_->kv_buffer.bytes() >> 20) << " MiB), batch "
                << config_.engine_max_batch << ", chunk " << chunk_tokens_ << ", "
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
  // Requests that wait for memory would wait for ever.
  if (mode == StopMode::kDrain) AS_RETURN_IF_ERROR(CheckMemory("stop_model with drain", true));
  {
    std::unique_lock lock(mutex_);
    accepting_ = false;
    stopping_ = true;
    stop_mode_ = mode;
    admission_.Close();
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
  statistics_.SetUsage({});
  state_ = ModelState::kStop;
  if (trace_ != nullptr) WriteLastTrace();
  return Status::Ok();
}

// The stop succeeds even if the trace cannot be written.
void ModelInstance::WriteLastTrace() const {
  try {
    const Status written = WriteTrace(config_.trace_path);
    if (!written.ok()) {
      AS_LOG(kError) << written.message();
    }
  } catch (const std::bad_alloc&) {
    AS_LOG(kError) << "no memory to write the trace to " << config_.trace_path;
  }
}

Status ModelInstance::WriteTrace(const std::string& path) const {
  if (trace_ != nullptr) return trace_->Write(path);
  return Status::FailedPrecondition("trace_path of model '" + config_.model_name +
                                    "' is empty; it keeps no trace");
}

Result<std::string> ModelInstance::OpProfilingInfo() const {
  if (op_profile_ == nullptr) {
    return Status::FailedPrecondition("op_profiling of model '" + config_.model_name +
                                      "' is off; nothing is measured");
  }
  return ToText(*op_profile_, "model '" + config_.model_name + "', " + device_.kernels->name +
                                  " kernels, " + std::to_string(device_.pool->num_threads()) +
                                  " threads");
}

EngineStat ModelInstance::Stat() const {
  EngineStat stat;
  stat.model_name = config_.model_name;
  stat.kernel_table = device_.kernels->name;
  stat.span_size = config_.cache_span_size;
  stat.total_span = num_blocks_;
  statistics_.Report(stat, SteadyNowUs());
  {
    std::lock_guard lock(mutex_);
    const int64_t num_live = admission_.num_live();
    stat.running_request = std::min(stat.running_request, num_live);
    stat.pending_request = num_live - stat.running_request;
    stat.blocked_request = admission_.num_blocked();
    stat.output_tensor_bytes = admission_.tensor_bytes();
  }
  const AllocatorStats memory = device_.allocator->Stats();
  stat.total_device_memory_pool_size = memory.pool_bytes;
  stat.used_device_memory_pool_size = memory.bytes_in_use;
  return stat;
}

}  // namespace allspark
