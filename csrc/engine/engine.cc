#include "allspark/engine.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <new>
#include <string>
#include <system_error>
#include <type_traits>

#include "base/mutex.h"
#include "engine/compute_unit.h"
#include "engine/metrics.h"
#include "engine/model_instance.h"
#include "engine/testing.h"
#include "memory/bfc_allocator.h"
#include "platform/float_mode.h"
#include "platform/home_process.h"
#include "platform/system_limits.h"

namespace allspark {

// Locks: `lifecycle_` serialises installs and the ends of releases (calls that change a model have
// its own Lifecycle); `models_mutex_` guards the list for the short time of a look-up, so no
// request waits for an install or a release.
class Engine::Impl {
 public:
  Result<std::shared_ptr<ModelInstance>> Find(const std::string& name) const {
    MutexLock lock(models_mutex_);
    const auto it = std::find_if(models_.begin(), models_.end(),
                                 [&](const auto& model) { return model.first == name; });
    if (it == models_.end()) {
      return Status::NotFound("no model '" + name + "' is installed in this engine");
    }
    return it->second;
  }

  Status CheckProcess() const { return home_.Check("engine"); }

  // Makes a call, unless this is a fork. If the heap has no memory for it, the result is
  // no_memory_.
  template <typename Call>
  std::invoke_result_t<Call> Guard(Call call) const {
    try {
      AS_RETURN_IF_ERROR(CheckProcess());
      const DefaultFloatMode mode;
      return call();
    } catch (const std::bad_alloc&) {
      return no_memory_;
    }
  }

  // The same, on an installed model.
  template <typename Call>
  std::invoke_result_t<Call, ModelInstance&> On(const std::string& name, Call call) const {
    return Guard([&]() -> std::invoke_result_t<Call, ModelInstance&> {
      AS_ASSIGN_OR_RETURN(const std::shared_ptr<ModelInstance> instance, Find(name));
      return call(*instance);
    });
  }

  Result<int64_t> CallPrefixCache(const std::string& name, PrefixOp op,
                                  std::span<const int64_t> prompt_ids,
                                  const std::string& lora_name) const {
    return On(name, [&](ModelInstance& instance) {
      return instance.CallPrefixCache(op, prompt_ids, lora_name);
    });
  }

  // `open` returns the file.
  template <typename Open>
  Status LoadLora(const std::string& model_name, const std::string& lora_name, Open open) const {
    return On(model_name, [&](ModelInstance& instance) {
      const Result<std::shared_ptr<const LoraFile>> file = open();
      return file.ok() ? instance.LoadLora(lora_name, **file) : file.status();
    });
  }

  // The device with its memory region. The region is made when it is first needed: after the first
  // model's weights are mapped, so that it leaves address space for them.
  Result<std::shared_ptr<Device>> MakeDevice(Compute compute) AS_REQUIRES(lifecycle_) {
    if (allocator_ == nullptr) {
      AS_ASSIGN_OR_RETURN(const BfcOptions options, BfcOptions::FromEnv());
      const MemoryBound total = TotalMemory();
      AS_ASSIGN_OR_RETURN(allocator_, CreateCpuBfcAllocator(options, total.bytes, total.source));
      cpu_cache_ratio_ = options.cpu_cache_ratio;
    }
    const kernels::KernelTable* table = test_table_;
    if (table == nullptr) {
      AS_ASSIGN_OR_RETURN(table, ChooseKernels());
    }
    CpuDevice::Parts parts{allocator_, std::move(compute.pool), table, cpu_cache_ratio_,
                           std::move(compute.numa)};
    if (make_device_ != nullptr) return make_device_(std::move(parts));
    return std::shared_ptr<Device>(std::make_shared<CpuDevice>(std::move(parts)));
  }

  // The compute pool with the config's number of threads, on the nodes that it names; made when
  // first needed.
  Result<Compute> MakeCompute(const RuntimeConfig& config) AS_REQUIRES(lifecycle_) {
    AS_ASSIGN_OR_RETURN(std::shared_ptr<const NumaPlacement> placement,
                        PlacementFor(config, numa_directory_));
    int num_threads = config.num_threads > 0 ? static_cast<int>(config.num_threads) : CpuCount();
    std::vector<int> cores;
    if (placement != nullptr) {
      cores = placement->cores();
      num_threads = placement->num_threads();
    }
    std::weak_ptr<ThreadPool>& known = pools_[{num_threads, cores}];
    std::shared_ptr<ThreadPool> pool = known.lock();
    if (pool != nullptr) return Compute{std::move(pool), std::move(placement)};
    try {
      pool = placement == nullptr ? std::make_shared<ThreadPool>(num_threads)
                                  : std::make_shared<ThreadPool>(cores, placement->caller_cores());
    } catch (const std::system_error& error) {
      return NoMoreThreads(num_threads, error);
    }
    known = pool;
    return Compute{std::move(pool), std::move(placement)};
  }

  std::shared_ptr<const ModelImage> FindImage(const std::string& name) AS_REQUIRES(lifecycle_) {
    const auto it = images_.find(name);
    return it == images_.end() ? nullptr : it->second.lock();
  }

  // Lets go of an image, under all names that it is registered by.
  void DropRegistered(const std::string& name) AS_REQUIRES(lifecycle_) {
    const std::shared_ptr<const ModelImage> image = FindImage(name);
    std::erase_if(registered_, [&](const auto& entry) { return entry.second == image; });
  }

  Result<std::unique_ptr<ModelReader>> OpenModel(RuntimeConfig& config, ThreadPool* pool)
      AS_REQUIRES(lifecycle_);
  // Null where the config names none.
  Result<std::unique_ptr<ModelReader>> OpenDraftModel(const RuntimeConfig& config, ThreadPool* pool)
      AS_REQUIRES(lifecycle_);
  Status Install(RuntimeConfig config);
  Status Release(const std::string& name);

  const HomeProcess home_;

  Mutex lifecycle_;
  std::shared_ptr<Allocator> allocator_ AS_GUARDED_BY(lifecycle_);
  double cpu_cache_ratio_ AS_GUARDED_BY(lifecycle_) = 0;
  // By the number of threads, and their cores on chosen nodes.
  std::map<std::pair<int, std::vector<int>>, std::weak_ptr<ThreadPool>> pools_
      AS_GUARDED_BY(lifecycle_);
  std::map<std::string, std::weak_ptr<const ModelImage>> images_ AS_GUARDED_BY(lifecycle_);
  // Not installed yet.
  std::map<std::string, std::shared_ptr<const ModelImage>> registered_ AS_GUARDED_BY(lifecycle_);
  // Tests': what makes devices (null: they are CPUs), kernels in place of the processor's, and a
  // directory in place of the machine's.
  DeviceMaker make_device_ AS_GUARDED_BY(lifecycle_) = TestingAccess::DefaultDeviceMaker();
  const kernels::KernelTable* test_table_ AS_GUARDED_BY(lifecycle_) = nullptr;
  std::string numa_directory_ AS_GUARDED_BY(lifecycle_) = kNumaDirectory;

  mutable Mutex models_mutex_;
  // In the order of installation.
  std::vector<std::pair<std::string, std::shared_ptr<ModelInstance>>> models_
      AS_GUARDED_BY(models_mutex_);

  // Made beforehand: a copy takes no memory.
  const Status no_memory_ =
      Status::ResourceExhausted("the heap has no memory for this call, which changed nothing");
  const std::shared_ptr<CompletionSetImpl> completions_ = std::make_shared<CompletionSetImpl>();
};

namespace {

// Of all engines: an event loop tells the queues of several engines apart by their ids.
std::atomic<uint64_t> next_request_id{1};

constexpr std::string_view kGraphEnding = ".asgraph";

// The path of the parameters beside `graph_path`, which ends in kGraphEnding.
std::string ParamPath(const std::string& graph_path) {
  return graph_path.substr(0, graph_path.size() - kGraphEnding.size()) + ".asparam";
}

Status CheckPaths(RuntimeConfig& config) {
  if (!config.weights_path.empty()) return Status::Ok();
  if (!config.model_path.ends_with(kGraphEnding)) {
    return Status::InvalidArgument("model_path is '" + config.model_path +
                                   "'; it must end in .asgraph when weights_path is empty");
  }
  config.weights_path = ParamPath(config.model_path);
  return Status::Ok();
}

}  // namespace

Result<std::unique_ptr<ModelReader>> Engine::Impl::OpenModel(RuntimeConfig& config,
                                                             ThreadPool* pool) {
  if (config.model_path.empty()) {
    if (!config.weights_path.empty()) {
      return Status::InvalidArgument("weights_path is '" + config.weights_path +
                                     "'; it must be empty where model_path is");
    }
    std::shared_ptr<const ModelImage> image = FindImage(config.model_name);
    if (image == nullptr) {
      return Status::NotFound("model_path is empty and no serialised model '" + config.model_name +
                              "' is in memory; serialise it again or name its files");
    }
    return ModelReader::OpenImage(std::move(image), pool);
  }
  AS_RETURN_IF_ERROR(CheckPaths(config));
  return ModelReader::OpenFiles(config.model_path, config.weights_path, pool);
}

Result<std::unique_ptr<ModelReader>> Engine::Impl::OpenDraftModel(const RuntimeConfig& config,
                                                                  ThreadPool* pool) {
  const std::string& name = config.draft_model;
  if (name.empty()) return std::unique_ptr<ModelReader>();
  if (name.ends_with(kGraphEnding)) return ModelReader::OpenFiles(name, ParamPath(name), pool);
  std::shared_ptr<const ModelImage> image = FindImage(name);
  if (image == nullptr) {
    return Status::NotFound("draft_model is '" + name +
                            "'; it must end in .asgraph, or be a serialised model in memory");
  }
  return ModelReader::OpenImage(std::move(image), pool);
}

Status Engine::Impl::Install(RuntimeConfig config) {
  AS_RETURN_IF_ERROR(Validate(config));
  if (config.model_name.empty()) {
    return Status::InvalidArgument("model_name is empty; an installed model needs a name");
  }
  ResolveComputeUnit(config);
  MutexLock lifecycle(lifecycle_);
  if (Find(config.model_name).ok()) {
    return Status::FailedPrecondition("a model '" + config.model_name +
                                      "' is installed already; names are unique in an engine");
  }
  AS_ASSIGN_OR_RETURN(Compute compute, MakeCompute(config));
  AS_ASSIGN_OR_RETURN(auto reader, OpenModel(config, compute.pool.get()));
  AS_ASSIGN_OR_RETURN(auto draft, OpenDraftModel(config, compute.pool.get()));
  AS_ASSIGN_OR_RETURN(auto device, MakeDevice(std::move(compute)));
  AS_ASSIGN_OR_RETURN(auto instance,
                      ModelInstance::Create(config, std::move(reader), std::move(draft),
                                            std::move(device), completions_));
  {
    MutexLock lock(models_mutex_);
    models_.emplace_back(config.model_name, std::move(instance));
  }
  // The instance holds the images now.
  if (config.model_path.empty()) DropRegistered(config.model_name);
  DropRegistered(config.draft_model);
  return Status::Ok();
}

Status Engine::Impl::Release(const std::string& name) {
  AS_ASSIGN_OR_RETURN(const std::shared_ptr<ModelInstance> instance, Find(name));
  // Before the locks: it may wait for another call on the model.
  AS_RETURN_IF_ERROR(instance->Release());
  // The instance dies after the locks.
  MutexLock lifecycle(lifecycle_);
  MutexLock lock(models_mutex_);
  std::erase_if(models_, [&](const auto& model) { return model.second == instance; });
  return Status::Ok();
}

Engine::Engine() : impl_(std::make_unique<Impl>()) {}

// Destroying the instances stops them; nobody else holds one. In a fork everything is left as it
// is: there is no thread to stop.
Engine::~Engine() {
  if (!impl_->home_.IsHere()) (void)impl_.release();
}

Status Engine::CheckProcess() const { return impl_->CheckProcess(); }

Status Engine::RegisterImage(const std::string& model_name,
                             std::shared_ptr<const ModelImage> image) {
  return impl_->Guard([&]() -> Status {
    if (model_name.empty()) return Status::InvalidArgument("model_name is empty");
    if (image == nullptr) return Status::InvalidArgument("image is null");
    MutexLock lifecycle(impl_->lifecycle_);
    // Both entries first: from there on nothing fails.
    auto& named = impl_->images_[model_name];
    auto& registered = impl_->registered_[model_name];
    named = image;
    registered = std::move(image);
    return Status::Ok();
  });
}

Status Engine::InstallModel(const RuntimeConfig& config) {
  return impl_->Guard([&] { return impl_->Install(config); });
}

Status Engine::StartModel(const std::string& model_name) {
  return impl_->On(model_name, [](ModelInstance& instance) { return instance.Start(); });
}

Status Engine::StopModel(const std::string& model_name, StopMode mode, int64_t timeout_ms,
                         const std::function<bool()>& cancelled) {
  return impl_->On(model_name, [&](ModelInstance& instance) {
    return instance.Stop(mode, timeout_ms, cancelled);
  });
}

Status Engine::ReleaseModel(const std::string& model_name) {
  return impl_->Guard([&] { return impl_->Release(model_name); });
}

Status Engine::UnloadDeviceMemory(const std::string& model_name) {
  return impl_->On(model_name, [](ModelInstance& instance) { return instance.UnloadMemory(); });
}

Status Engine::LoadDeviceMemory(const std::string& model_name) {
  return impl_->On(model_name, [](ModelInstance& instance) { return instance.LoadMemory(); });
}

Result<ModelState> Engine::GetModelState(const std::string& model_name) const {
  return impl_->On(model_name,
                   [](ModelInstance& instance) -> Result<ModelState> { return instance.state(); });
}

Result<std::string> Engine::GetModelSpec(const std::string& model_name) const {
  return impl_->On(model_name, [](ModelInstance& instance) -> Result<std::string> {
    return instance.spec().SerializeAsString();
  });
}

std::vector<std::string> Engine::ListModels() const {
  if (!impl_->home_.IsHere()) return {};
  MutexLock lock(impl_->models_mutex_);
  std::vector<std::string> names;
  for (const auto& [name, model] : impl_->models_) names.push_back(name);
  return names;
}

Result<StartedRequest> Engine::StartRequest(const std::string& model_name,
                                            std::span<const int64_t> prompt_ids,
                                            const GenerationConfig& config,
                                            std::shared_ptr<TokenMask> token_mask,
                                            const std::function<bool()>& cancelled) {
  return impl_->On(model_name, [&](ModelInstance& instance) {
    // The sequences of a request have ids that follow one another.
    const int64_t num_ids =
        std::clamp<int64_t>(std::max(config.num_beams, config.best_of), 1, kMaxSequences);
    return instance.Submit(next_request_id.fetch_add(static_cast<uint64_t>(num_ids)), prompt_ids,
                           config, std::move(token_mask), cancelled);
  });
}

Status Engine::StopRequest(const std::string& model_name, RequestHandle handle,
                           FinishReason reason) {
  return impl_->On(model_name,
                   [&](ModelInstance& instance) { return instance.StopRequest(handle, reason); });
}

Status Engine::ReleaseRequest(const std::string& model_name, RequestHandle handle) {
  return impl_->On(model_name,
                   [&](ModelInstance& instance) { return instance.ReleaseRequest(handle); });
}

Status Engine::SyncRequest(const std::string& model_name, RequestHandle handle, int64_t timeout_ms,
                           const std::function<bool()>& cancelled) {
  return SyncRequests(model_name, {&handle, 1}, timeout_ms, cancelled);
}

Status Engine::SyncRequests(const std::string& model_name, std::span<const RequestHandle> handles,
                            int64_t timeout_ms, const std::function<bool()>& cancelled) {
  return impl_->On(model_name, [&](ModelInstance& instance) {
    return instance.SyncRequests(handles, timeout_ms, cancelled);
  });
}

Status Engine::SyncAllRequests(const std::string& model_name, int64_t timeout_ms,
                               const std::function<bool()>& cancelled) {
  return impl_->On(
      model_name, [&](ModelInstance& instance) { return instance.SyncAll(timeout_ms, cancelled); });
}

Status Engine::LoadLora(const std::string& model_name, const std::string& lora_name,
                        const std::string& path) {
  return impl_->LoadLora(model_name, lora_name, [&] { return LoraFile::Open(path); });
}

Status Engine::LoadLora(const std::string& model_name, const std::string& lora_name,
                        std::shared_ptr<const LoraImage> image) {
  if (image == nullptr) return Status::InvalidArgument("image is null");
  return impl_->LoadLora(model_name, lora_name,
                         [&] { return LoraFile::OpenImage(std::move(image)); });
}

Status Engine::UnloadLora(const std::string& model_name, const std::string& lora_name) {
  return impl_->On(model_name,
                   [&](ModelInstance& instance) { return instance.UnloadLora(lora_name); });
}

Result<std::vector<std::string>> Engine::ListLoras(const std::string& model_name) const {
  return impl_->On(model_name, [](ModelInstance& instance) -> Result<std::vector<std::string>> {
    return instance.loras().Names();
  });
}

Result<int64_t> Engine::FindPrefix(const std::string& model_name,
                                   std::span<const int64_t> prompt_ids,
                                   const std::string& lora_name) {
  return impl_->CallPrefixCache(model_name, PrefixOp::kFind, prompt_ids, lora_name);
}

Result<int64_t> Engine::PinPrefix(const std::string& model_name,
                                  std::span<const int64_t> prompt_ids,
                                  const std::string& lora_name) {
  return impl_->CallPrefixCache(model_name, PrefixOp::kPin, prompt_ids, lora_name);
}

Result<int64_t> Engine::UnpinPrefix(const std::string& model_name,
                                    std::span<const int64_t> prompt_ids,
                                    const std::string& lora_name) {
  return impl_->CallPrefixCache(model_name, PrefixOp::kUnpin, prompt_ids, lora_name);
}

Result<int64_t> Engine::ClearPrefixCache(const std::string& model_name) {
  return impl_->CallPrefixCache(model_name, PrefixOp::kClear, {}, "");
}

Result<ModelInfo> Engine::GetModelInfo(const std::string& model_name) const {
  return impl_->On(model_name,
                   [](ModelInstance& instance) -> Result<ModelInfo> { return instance.info(); });
}

Result<EngineStat> Engine::GetEngineStat(const std::string& model_name) const {
  return impl_->On(model_name,
                   [](ModelInstance& instance) -> Result<EngineStat> { return instance.Stat(); });
}

Status Engine::WriteTrace(const std::string& model_name, const std::string& path) const {
  return impl_->On(model_name, [&](ModelInstance& instance) { return instance.WriteTrace(path); });
}

Result<std::string> Engine::GetOpProfilingInfo(const std::string& model_name) const {
  return impl_->On(model_name, [](ModelInstance& instance) { return instance.OpProfilingInfo(); });
}

std::vector<Metric> Engine::GetMetrics() const {
  std::vector<Metric> metrics;
  for (const std::string& name : ListModels()) {
    const Result<std::shared_ptr<ModelInstance>> instance = impl_->Find(name);
    if (instance.ok()) MergeMetrics(metrics, (*instance)->Metrics());
  }
  return metrics;
}

std::shared_ptr<CompletionSet> Engine::completions() const { return impl_->completions_; }

Status TestingAccess::SetStepHook(Engine& engine, const std::string& model_name, StepHook hook) {
  MutexLock lifecycle(engine.impl_->lifecycle_);
  AS_ASSIGN_OR_RETURN(const std::shared_ptr<ModelInstance> instance,
                      engine.impl_->Find(model_name));
  if (instance->state() == ModelState::kRunning) {
    return Status::FailedPrecondition("the step hook is set before start_model");
  }
  instance->set_step_hook(std::move(hook));
  return Status::Ok();
}

void TestingAccess::SetDeviceMaker(Engine& engine, DeviceMaker maker) {
  MutexLock lifecycle(engine.impl_->lifecycle_);
  engine.impl_->make_device_ = std::move(maker);
}

void TestingAccess::SetAllocator(Engine& engine, std::shared_ptr<Allocator> allocator) {
  MutexLock lifecycle(engine.impl_->lifecycle_);
  engine.impl_->allocator_ = std::move(allocator);
  const Result<BfcOptions> options = BfcOptions::FromEnv();
  if (options.ok()) engine.impl_->cpu_cache_ratio_ = options->cpu_cache_ratio;
}

void TestingAccess::SetKernelTable(Engine& engine, const kernels::KernelTable* table) {
  MutexLock lifecycle(engine.impl_->lifecycle_);
  engine.impl_->test_table_ = table;
}

void TestingAccess::SetNumaDirectory(Engine& engine, std::string directory) {
  MutexLock lifecycle(engine.impl_->lifecycle_);
  engine.impl_->numa_directory_ = std::move(directory);
}

AllocatorStats TestingAccess::DeviceStats(Engine& engine) {
  MutexLock lifecycle(engine.impl_->lifecycle_);
  if (engine.impl_->allocator_ == nullptr) return {};
  return engine.impl_->allocator_->Stats();
}

}  // namespace allspark
