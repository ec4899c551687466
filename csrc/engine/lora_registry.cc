#include "engine/lora_registry.h"

#include <atomic>
#include <utility>

namespace allspark {
namespace {

std::atomic<uint64_t> next_cache_salt{1};

}  // namespace

Status LoraRegistry::CheckLocked(const std::string& name) const {
  if (name.empty()) return Status::InvalidArgument("lora_name is empty; an adapter needs a name");
  if (loras_.contains(name)) {
    return Status(StatusCode::kFailedPrecondition, AsStatus::kLoraAlreadyLoaded,
                  "lora_name is '" + name + "', which is loaded already; unload it first");
  }
  const auto num = static_cast<int64_t>(loras_.size());
  if (num < max_num_) return Status::Ok();
  return Status(
      StatusCode::kFailedPrecondition, AsStatus::kLoraNumExceedLimitError,
      std::to_string(num) + " adapters are loaded; lora_max_num is " + std::to_string(max_num_));
}

Status LoraRegistry::NotFoundLocked(const std::string& name) const {
  std::string known;
  for (const auto& [other, lora] : loras_) known += (known.empty() ? "'" : ", '") + other + "'";
  return Status(StatusCode::kNotFound, AsStatus::kLoraNotFound,
                "lora_name is '" + name + "'; loaded are " + (known.empty() ? "none" : known));
}

Status LoraRegistry::Check(const std::string& name) const {
  MutexLock lock(mutex_);
  return CheckLocked(name);
}

Status LoraRegistry::Add(const std::string& name, std::shared_ptr<const LoraAdapter> adapter) {
  auto lora = std::make_shared<LoadedLora>(LoadedLora{name, next_cache_salt++, std::move(adapter)});
  MutexLock lock(mutex_);
  AS_RETURN_IF_ERROR(CheckLocked(name));
  loras_.emplace(name, std::move(lora));
  return Status::Ok();
}

Result<uint64_t> LoraRegistry::Remove(const std::string& name) {
  std::shared_ptr<const LoadedLora> removed;  // dies after the lock
  MutexLock lock(mutex_);
  const auto it = loras_.find(name);
  if (it == loras_.end()) return NotFoundLocked(name);
  // Only Find, under this lock, makes more users.
  if (const int64_t users = it->second.use_count() - 1; users > 0) {
    return Status(StatusCode::kFailedPrecondition, AsStatus::kLoraInUse,
                  "lora_name is '" + name + "', which " + std::to_string(users) +
                      " requests use that have not ended");
  }
  removed = std::move(it->second);
  loras_.erase(it);
  return removed->cache_salt;
}

Result<std::shared_ptr<const LoadedLora>> LoraRegistry::Find(const std::string& name) const {
  if (name.empty()) return std::shared_ptr<const LoadedLora>();
  MutexLock lock(mutex_);
  const auto it = loras_.find(name);
  if (it == loras_.end()) return NotFoundLocked(name);
  return it->second;
}

std::vector<std::string> LoraRegistry::Names() const {
  MutexLock lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, lora] : loras_) names.push_back(name);
  return names;
}

}  // namespace allspark
