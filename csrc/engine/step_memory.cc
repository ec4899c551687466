// The part of ModelInstance for when memory is short: it ends interrupted requests, copies blocks
// to and from the host tier, and gives the model's memory back for a while.

#include <string>

#include "engine/model_instance.h"

namespace allspark {

bool ModelInstance::EndInterrupted() {
  Running& running = *running_;
  const std::vector<ScheduledSequence*>& interrupted = running.scheduler->interrupted();
  // Several may be of one group, which lives as long as its first member: in_step keeps that alive.
  running.in_step = true;
  for (ScheduledSequence* sequence : interrupted) {
    EndRequest(static_cast<Request*>(sequence), FinishReason::kInterrupted, "");
  }
  running.in_step = false;
  running.ended.clear();
  return !interrupted.empty();
}

void ModelInstance::CopyBlocks() {
  Running& running = *running_;
  PrefixCache& cache = running.scheduler->prefix_cache();
  const auto bytes = static_cast<size_t>(running.decoder->block_bytes());
  for (const HostCopy& copy : cache.copies()) {
    const KvBlock block = running.decoder->BlockAt(running.kv, copy.block);
    const KvBlock host =
        block.PackedAt(running.host_blocks.data() + static_cast<size_t>(copy.slot) * bytes);
    if (copy.to_host) {
      device_.host_copier->ToHost(block, host);
    } else {
      device_.host_copier->ToDevice(host, block);
    }
  }
  cache.ClearCopies();
}

Status ModelInstance::CheckMemory(const char* call, bool has_memory) const {
  const std::string what = std::string(call) + ": model '" + config_.model_name + "' is ";
  if (state_ != ModelState::kRunning) {
    return Status::FailedPrecondition(what + std::string(ModelStateName(state_.load())) +
                                      "; it must be Running");
  }
  if (running_->has_memory == has_memory) return Status::Ok();
  return Status::FailedPrecondition(what + (has_memory ? "unloaded; load_device_mem comes first"
                                                       : "loaded; unload_device_mem comes first"));
}

Status ModelInstance::UnloadMemory() {
  std::lock_guard lifecycle(lifecycle_mutex_);
  AS_RETURN_IF_ERROR(CheckMemory("unload_device_mem", true));
  const auto unload = [this]() -> Result<int64_t> {
    Scheduler& scheduler = *running_->scheduler;
    scheduler.PreemptAll();
    scheduler.prefix_cache().Clear();
    GiveMemoryBack(*running_);
    reader_->ReleasePages();
    if (draft_reader_ != nullptr) draft_reader_->ReleasePages();
    return 0;
  };
  return CallStepThread("unload_device_mem", unload).status();
}

Status ModelInstance::LoadMemory() {
  std::lock_guard lifecycle(lifecycle_mutex_);
  AS_RETURN_IF_ERROR(CheckMemory("load_device_mem", false));
  const auto load = [this]() -> Result<int64_t> {
    try {
      Status status = TakeMemory(*running_);
      if (status.ok()) {
        WarmUp(*running_);
        status = CheckWeights();
      }
      if (!status.ok()) {
        GiveMemoryBack(*running_);
        return status;
      }
    } catch (...) {
      GiveMemoryBack(*running_);
      throw;
    }
    running_->has_memory = true;
    return 0;
  };
  return CallStepThread("load_device_mem", load).status();
}

}  // namespace allspark
