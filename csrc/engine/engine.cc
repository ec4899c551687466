#include "allspark/engine.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <string>
#include <system_error>
#include <type_traits>

#include "base/log.h"
#include "engine/compute_unit.h"
#include "engine/metrics.h"
#include "engine/model_instance.h"
#include "engine/testing.h"
#include "engine/version.h"
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
    std::shared_lock lock(models_mutex_);
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
      Result<std::shared_ptr<ModelInstance>> instance = Find(name);
      if (!instance.ok()) return instance.status();
      return call(**instance);
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
  Result<std::shared_ptr<Device>> MakeDevice(Compute compute) {
    if (allocator_ == nullptr) {
      Result<BfcOptions> options = BfcOptions::FromEnv();
      if (!options.ok()) return options.status();
      const MemoryBound total = TotalMemory();
      Result<std::unique_ptr<Allocator>> allocator =
          CreateCpuBfcAllocator(*options, total.bytes, total.source);
      if (!allocator.ok()) return allocator.status();
      allocator_ = std::move(*allocator);
      cpu_cache_ratio_ = options->cpu_cache_ratio;
    }
    Result<const kernels::KernelTable*> table = test_table_;
    if (test_table_ == nullptr) table = ChooseKernels();
    if (!table.ok()) return table.status();
    CpuDevice::Parts parts{allocator_, std::move(compute.pool), *table, cpu_cache_ratio_,
                           std::move(compute.numa)};
    if (make_device_ != nullptr) return make_device_(std::move(parts));
    return std::shared_ptr<Device>(std::make_shared<CpuDevice>(std::move(parts)));
  }

  // The compute pool with the config's number of threads, on the nodes that it names; made when
  // first needed.
  Result<Compute> MakeCompute(const RuntimeConfig& config) {
    Result<std::shared_ptr<const NumaPlacement>> numa = PlacementFor(config, numa_directory_);
    if (!numa.ok()) return numa.status();
    const NumaPlacement* const placement = numa->get();
    int num_threads = config.num_threads > 0 ? static_cast<int>(config.num_threads) : CpuCount();
    std::vector<int> cores;
    if (placement != nullptr) {
      cores = placement->cores();
      num_threads = placement->num_threads();
    }
    std::weak_ptr<ThreadPool>& known = pools_[{num_threads, cores}];
    std::shared_ptr<ThreadPool> pool = known.lock();
    if (pool != nullptr) return Compute{std::move(pool), std::move(*numa)};
    try {
      pool = placement == nullptr ? std::make_shared<ThreadPool>(num_threads)
                                  : std::make_shared<ThreadPool>(cores, placement->caller_cores());
    } catch (const std::system_error& error) {
      return Status::ResourceExhausted("num_threads is " + std::to_string(num_threads) +
                                       ", but the system gives no more threads: " + error.what());
    }
    known = pool;
    return Compute{std::move(pool), std::move(*numa)};
  }

  std::shared_ptr<const ModelImage> FindImage(const std::string& name) {
    const auto it = images_.find(name);
    return it == images_.end() ? nullptr : it->second.lock();
  }

  // Lets go of an image, under all names that it is registered by.
  void DropRegistered(const std::string& name) {
    const std::shared_ptr<const ModelImage> image = FindImage(name);
    std::erase_if(registered_, [&](const auto& entry) { return entry.second == image; });
  }

  Result<std::unique_ptr<ModelReader>> OpenModel(RuntimeConfig& config, ThreadPool* pool);
  // Null where the config names none.
  Result<std::unique_ptr<ModelReader>> OpenDraftModel(const RuntimeConfig& config,
                                                      ThreadPool* pool);
  Status Install(RuntimeConfig config);
  Status Release(const std::string& name);

  const HomeProcess home_;

  std::mutex lifecycle_;
  // Guarded by lifecycle_.
  std::shared_ptr<Allocator> allocator_;
  DeviceMaker make_device_ = TestingAccess::DefaultDeviceMaker();  // a test's; null: the CPU
  const kernels::KernelTable* test_table_ = nullptr;  // a test's, in place of the processor's
  double cpu_cache_ratio_ = 0;
  std::string numa_directory_ = kNumaDirectory;  // a test's, in place of the machine's
  // By the number of threads, and their cores on chosen nodes.
  std::map<std::pair<int, std::vector<int>>, std::weak_ptr<ThreadPool>> pools_;
  std::map<std::string, std::weak_ptr<const ModelImage>> images_;
  std::map<std::string, std::shared_ptr<const ModelImage>> registered_;  // not installed yet

  mutable std::shared_mutex models_mutex_;
  // Guarded by models_mutex_; in the order of installation.
  std::vector<std::pair<std::string, std::shared_ptr<ModelInstance>>> models_;

  // Made beforehand: a copy takes no memory.
  const Status no_memory_ =
      Status::ResourceExhausted("the heap has no memory for this call, which changed nothing");
  const std::shared_ptr<CompletionSetImpl> completions_ = std::make_shared<CompletionSetImpl>();
  const std::shared_ptr<CompletionSet> completions_base_ = completions_;
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
  std::lock_guard lifecycle(lifecycle_);
  if (Find(config.model_name).ok()) {
    return Status::FailedPrecondition("a model '" + config.model_name +
                                      "' is installed already; names are unique in an engine");
  }
  Result<Compute> compute = MakeCompute(config);
  if (!compute.ok()) return compute.status();
  Result<std::unique_ptr<ModelReader>> reader = OpenModel(config, compute->pool.get());
  if (!reader.ok()) return reader.status();
  Result<std::unique_ptr<ModelReader>> draft = OpenDraftModel(config, compute->pool.get());
  if (!draft.ok()) return draft.status();
  Result<std::shared_ptr<Device>> device = MakeDevice(std::move(*compute));
  if (!device.ok()) return device.status();
  Result<std::unique_ptr<ModelInstance>> instance = ModelInstance::Create(
      config, std::move(*reader), std::move(*draft), std::move(*device), completions_);
  if (!instance.ok()) return instance.status();
  {
    std::unique_lock lock(models_mutex_);
    models_.emplace_back(config.model_name, std::move(*instance));
  }
  // The instance holds the images now.
  if (config.model_path.empty()) DropRegistered(config.model_name);
  DropRegistered(config.draft_model);
  return Status::Ok();
}

Status Engine::Impl::Release(const std::string& name) {
  Result<std::shared_ptr<ModelInstance>> instance = Find(name);
  if (!instance.ok()) return instance.status();
  // Before the locks: it may wait for another call on the model.
  AS_RETURN_IF_ERROR((*instance)->Release());
  // The instance dies after the locks.
  std::lock_guard lifecycle(lifecycle_);
  std::unique_lock lock(models_mutex_);
  std::erase_if(models_, [&](const auto& model) { return model.second == *instance; });
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
    std::lock_guard lifecycle(impl_->lifecycle_);
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
  std::shared_lock lock(impl_->models_mutex_);
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
  return impl_->On(model_name, [&](ModelInstance& instance) {
    return instance.SyncRequest(handle, timeout_ms, cancelled);
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

const std::shared_ptr<CompletionSet>& Engine::completions() const {
  return impl_->completions_base_;
}

std::string Engine::Version() { return std::string(kVersion) + "/(GitSha1:" + kGitSha1 + ")"; }

Status TestingAccess::SetStepHook(Engine& engine, const std::string& model_name, StepHook hook,
                                  void* context) {
  std::lock_guard lifecycle(engine.impl_->lifecycle_);
  Result<std::shared_ptr<ModelInstance>> instance = engine.impl_->Find(model_name);
  if (!instance.ok()) return instance.status();
  if ((*instance)->state() == ModelState::kRunning) {
    return Status::FailedPrecondition("the step hook is set before start_model");
  }
  (*instance)->set_step_hook(hook, context);
  return Status::Ok();
}

void TestingAccess::SetDeviceMaker(Engine& engine, DeviceMaker maker) {
  std::lock_guard lifecycle(engine.impl_->lifecycle_);
  engine.impl_->make_device_ = std::move(maker);
}

void TestingAccess::SetAllocator(Engine& engine, std::shared_ptr<Allocator> allocator) {
  std::lock_guard lifecycle(engine.impl_->lifecycle_);
  engine.impl_->allocator_ = std::move(allocator);
  const Result<BfcOptions> options = BfcOptions::FromEnv();
  if (options.ok()) engine.impl_->cpu_cache_ratio_ = options->cpu_cache_ratio;
}

void TestingAccess::SetKernelTable(Engine& engine, const kernels::KernelTable* table) {
  std::lock_guard lifecycle(engine.impl_->lifecycle_);
  engine.impl_->test_table_ = table;
}

void TestingAccess::SetNumaDirectory(Engine& engine, std::string directory) {
  std::lock_guard lifecycle(engine.impl_->lifecycle_);
  engine.impl_->numa_directory_ = std::move(directory);
}

Result<AllocatorStats> TestingAccess::DeviceStats(Engine& engine) {
  std::lock_guard lifecycle(engine.impl_->lifecycle_);
  if (engine.impl_->allocator_ == nullptr) return AllocatorStats{};
  return engine.impl_->allocator_->Stats();
}

}  // namespace allspark
