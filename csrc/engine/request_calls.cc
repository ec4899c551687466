// ModelInstance's calls about requests: each takes the mailbox's lock for a moment, or waits at a
// queue.

#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/int_math.h"
#include "engine/model_instance.h"

namespace allspark {

Result<StartedRequest> ModelInstance::Submit(uint64_t request_id,
                                             std::span<const int64_t> prompt_ids,
                                             const GenerationConfig& generation,
                                             std::shared_ptr<TokenMask> token_mask,
                                             const std::function<bool()>& cancelled) {
  AS_RETURN_IF_ERROR(CheckWeights());
  Result<std::shared_ptr<Request>> created = Request::Create(
      request_id, prompt_ids, generation, limits_, engine_set_, std::move(token_mask));
  if (!created.ok()) return created.status();
  std::shared_ptr<Request>& request = *created;
  Result<std::shared_ptr<const LoadedLora>> lora = loras_.Find(generation.lora_name);
  if (!lora.ok()) return lora.status();
  request->UseLora(std::move(*lora));
  StartedRequest started{RequestHandle{request_id}, request->queue};
  if (request->group != nullptr) {
    for (const Request* other : request->group->returned().subspan(1)) {
      started.next_best.push_back({RequestHandle{other->request_id}, other->queue});
    }
  }
  std::unique_lock lock(mutex_);
  AS_RETURN_IF_ERROR(CheckAcceptingLocked("a request"));
  const Status entered = admission_.Enter(lock, request->share(), request->deadline_us, cancelled);
  if (!entered.ok()) {
    statistics_.OnDenied();
    return entered;
  }
  try {
    EnlistLocked(request);
  } catch (...) {
    admission_.Leave(request->share());
    throw;
  }
  request->self = request;
  (new_tail_ != nullptr ? new_tail_->next_new : new_head_) = request.get();
  new_tail_ = request.get();
  mail_.notify_one();
  return started;
}

void ModelInstance::EnlistLocked(const std::shared_ptr<Request>& request) {
  try {
    requests_.emplace(request->request_id, request);
    if (request->group != nullptr) {
      for (const Request* other : request->group->returned().subspan(1)) {
        requests_.emplace(other->request_id, request);
      }
    }
    if (request->deadline_us != kNoDeadline) {
      deadlines_.emplace(request->deadline_us, request.get());
    }
  } catch (...) {
    DelistLocked(*request);
    throw;
  }
}

void ModelInstance::DelistLocked(const Request& request) {
  requests_.erase(request.request_id);
  if (request.group == nullptr) return;
  for (const Request* other : request.group->returned()) requests_.erase(other->request_id);
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

namespace {

// How often a waiting caller's `cancelled` is called.
constexpr int64_t kSliceMs = 100;
// A longer time would overflow in the clock's own unit.
constexpr int64_t kLongestMs = int64_t{100} * 365 * 24 * 3600 * 1000;  // a century

// Waits for requests to end, all within one timeout.
class EndWaiter {
 public:
  EndWaiter(int64_t timeout_ms, const std::function<bool()>& cancelled)
      : timeout_ms_(timeout_ms),
        deadline_us_(SteadyNowUs() + std::min(timeout_ms, kLongestMs) * 1000),
        cancelled_(cancelled) {}

  Status Await(ResultQueueImpl& queue) const {
    const auto unfinished = [&] {
      return "sync_request: request " + std::to_string(queue.request_id()) + " has not ended";
    };
    while (!queue.WaitTerminal(NextWaitMs())) {
      if (cancelled_ && cancelled_()) {
        return Status::Cancelled(unfinished() + "; the caller gave up");
      }
      if (timeout_ms_ >= 0 && SteadyNowUs() >= deadline_us_) {
        return Status::DeadlineExceeded(unfinished() + " within " + std::to_string(timeout_ms_) +
                                        " ms");
      }
    }
    return Status::Ok();
  }

 private:
  int64_t NextWaitMs() const {
    const int64_t slice_ms = cancelled_ ? kSliceMs : kLongestMs;
    if (timeout_ms_ < 0) return slice_ms;
    return std::min(CeilDiv(std::max<int64_t>(deadline_us_ - SteadyNowUs(), 0), 1000), slice_ms);
  }

  const int64_t timeout_ms_, deadline_us_;
  const std::function<bool()>& cancelled_;
};

}  // namespace

Status ModelInstance::SyncRequest(RequestHandle handle, int64_t timeout_ms,
                                  const std::function<bool()>& cancelled) {
  std::shared_ptr<ResultQueueImpl> queue;
  {
    std::lock_guard lock(mutex_);
    Result<std::shared_ptr<Request>> request = Find(handle);
    if (!request.ok()) return request.status();
    queue = (*request)->queue;
  }
  return EndWaiter(timeout_ms, cancelled).Await(*queue);
}

Status ModelInstance::SyncAll(int64_t timeout_ms, const std::function<bool()>& cancelled) {
  std::vector<std::shared_ptr<ResultQueueImpl>> queues;
  {
    std::lock_guard lock(mutex_);
    queues.reserve(requests_.size());
    for (const auto& [id, request] : requests_) queues.push_back(request->queue);
  }
  const EndWaiter waiter(timeout_ms, cancelled);
  for (const auto& queue : queues) AS_RETURN_IF_ERROR(waiter.Await(*queue));
  return Status::Ok();
}

}  // namespace allspark
