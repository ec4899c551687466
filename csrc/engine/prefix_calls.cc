// ModelInstance's calls on the prefix cache.

#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/model_instance.h"

namespace allspark {

Result<int64_t> ModelInstance::CallPrefixCache(PrefixOp op, std::span<const int64_t> prompt_ids,
                                               const std::string& lora_name) {
  if (!config_.enable_prefix_cache) {
    return Status::FailedPrecondition("enable_prefix_cache of model '" + config_.model_name +
                                      "' is false; it has no prefix cache");
  }
  AS_RETURN_IF_ERROR(CheckTokenIds(prompt_ids, limits_.vocab_size));
  Result<std::shared_ptr<const LoadedLora>> lora = loras_.Find(lora_name);
  if (!lora.ok()) return lora.status();
  const uint64_t salt = *lora != nullptr ? (*lora)->cache_salt : 0;
  const std::vector<int32_t> tokens(prompt_ids.begin(), prompt_ids.end());
  return CallStepThread("a call on the prefix cache", [&]() -> Result<int64_t> {
    PrefixCache& cache = running_->scheduler->prefix_cache();
    cache.Advance(SteadyNowUs());
    switch (op) {
      case PrefixOp::kFind: {
        const PrefixCache::Match match = cache.FindAll(tokens, salt);
        return (match.num_blocks + cache.CountOnHost(match, tokens, salt)) *
               config_.cache_span_size;
      }
      case PrefixOp::kPin:
        return cache.Pin(tokens, salt);
      case PrefixOp::kUnpin:
        return cache.Unpin(tokens, salt);
      case PrefixOp::kClear:
        break;
    }
    return cache.Clear() * config_.cache_span_size;
  });
}

}  // namespace allspark
