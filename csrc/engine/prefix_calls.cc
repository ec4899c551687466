// ModelInstance's calls on the prefix cache. The cache is the step thread's, so a caller posts what
// it wants and sleeps until that thread has done it, between two steps.

#include <string>
#include <utility>

#include "base/clock.h"
#include "engine/model_instance.h"

namespace allspark {

struct ModelInstance::PrefixCall {
  PrefixOp op;
  std::vector<int32_t> tokens;
  Result<int64_t> result = int64_t{0};
  bool done = false;  // guarded by mutex_
  PrefixCall* next = nullptr;
};

Result<int64_t> ModelInstance::CallPrefixCache(PrefixOp op, std::span<const int64_t> prompt_ids) {
  if (!config_.enable_prefix_cache) {
    return Status::FailedPrecondition("enable_prefix_cache of model '" + config_.model_name +
                                      "' is false; it has no prefix cache");
  }
  AS_RETURN_IF_ERROR(CheckTokenIds(prompt_ids, limits_.vocab_size));
  PrefixCall call{.op = op, .tokens = {prompt_ids.begin(), prompt_ids.end()}};
  std::unique_lock lock(mutex_);
  AS_RETURN_IF_ERROR(CheckAcceptingLocked("a call on the prefix cache"));
  call.next = std::exchange(prefix_calls_, &call);
  mail_.notify_one();
  prefix_calls_done_.wait(lock, [&] { return call.done; });
  return std::move(call.result);
}

Result<int64_t> ModelInstance::AnswerPrefixCall(const PrefixCall& call) {
  PrefixCache& cache = running_->scheduler->prefix_cache();
  switch (call.op) {
    case PrefixOp::kFind:
      return cache.FindAll(call.tokens, 0).num_blocks * config_.cache_span_size;
    case PrefixOp::kPin:
      return cache.Pin(call.tokens, 0);
    case PrefixOp::kUnpin:
      return cache.Unpin(call.tokens, 0);
    case PrefixOp::kClear:
      break;
  }
  return cache.Clear() * config_.cache_span_size;
}

void ModelInstance::AnswerPrefixCalls(PrefixCall* calls) {
  if (calls == nullptr) return;
  for (PrefixCall* call = calls; call != nullptr; call = call->next) {
    try {
      running_->scheduler->prefix_cache().Advance(SteadyNowUs());
      call->result = AnswerPrefixCall(*call);
    } catch (const std::exception& error) {
      call->result = Status::Internal(error.what());
    }
  }
  PublishUsage();
  std::lock_guard lock(mutex_);
  FinishPrefixCallsLocked(calls);
}

void ModelInstance::FailPrefixCallsLocked() {
  for (PrefixCall* call = prefix_calls_; call != nullptr; call = call->next) {
    call->result = Status::RequestDenied("model '" + config_.model_name + "' is stopping");
  }
  FinishPrefixCallsLocked(std::exchange(prefix_calls_, nullptr));
}

void ModelInstance::FinishPrefixCallsLocked(PrefixCall* calls) {
  for (PrefixCall* call = calls; call != nullptr; call = call->next) call->done = true;
  prefix_calls_done_.notify_all();
}

}  // namespace allspark
