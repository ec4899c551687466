// LoraRegistry: the adapters that one model has loaded, by name. Any thread may call.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "allspark/status.h"
#include "base/mutex.h"
#include "model/lora.h"

namespace allspark {

// Held by the registry and by each request that uses it.
struct LoadedLora {
  std::string name;
  // Distinguishes the blocks of this adapter from all others in the prefix cache. Never the same
  // twice, since another adapter may get the name after an unload. Not 0, which stands for no
  // adapter.
  uint64_t cache_salt = 0;
  std::shared_ptr<const LoraAdapter> adapter;
};

class LoraRegistry {
 public:
  explicit LoraRegistry(int64_t max_num) : max_num_(max_num) {}

  // Whether Add would take the name now: LORA_ALREADY_LOADED, LORA_NUM_EXCEED_LIMIT_ERROR.
  Status Check(const std::string& name) const;
  Status Add(const std::string& name, std::shared_ptr<const LoraAdapter> adapter);
  // Returns the adapter's cache_salt. LORA_NOT_FOUND; LORA_IN_USE while a request that has not
  // ended uses it.
  Result<uint64_t> Remove(const std::string& name);
  // LORA_NOT_FOUND, naming the loaded adapters. Null for the empty name.
  Result<std::shared_ptr<const LoadedLora>> Find(const std::string& name) const;
  // In alphabetical order.
  std::vector<std::string> Names() const;

 private:
  Status CheckLocked(const std::string& name) const AS_REQUIRES(mutex_);
  Status NotFoundLocked(const std::string& name) const AS_REQUIRES(mutex_);

  const int64_t max_num_;
  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<const LoadedLora>> loras_ AS_GUARDED_BY(mutex_);
};

}  // namespace allspark
