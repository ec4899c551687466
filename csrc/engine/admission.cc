#include "engine/admission.h"

#include <string>
#include <utility>

#include "base/clock.h"
#include "platform/system_limits.h"

namespace allspark {
namespace {

// By default, output tensors may take 1 / kTensorShare of the memory. Weights and KV cache come
// first, and tensors that finished requests handed out are not counted.
constexpr int64_t kTensorShare = 8;

// Calls a function at the end of a scope, also on an exception.
template <typename Function>
class OnReturn {
 public:
  explicit OnReturn(Function function) : function_(std::move(function)) {}
  ~OnReturn() { function_(); }
  OnReturn(const OnReturn&) = delete;
  OnReturn& operator=(const OnReturn&) = delete;

 private:
  const Function function_;
};

}  // namespace

Admission::Admission(const RuntimeConfig& config)
    : max_batch_(config.engine_max_batch),
      max_waiting_(config.max_waiting_requests),
      max_tensor_bytes_(config.max_output_tensor_bytes > 0 ? config.max_output_tensor_bytes
                                                           : TotalMemory().bytes / kTensorShare),
      bounds_by_default_(config.max_output_tensor_bytes == 0),
      blocks_(config.queue_full_policy == QueueFullPolicy::kBlock) {}

Status Admission::Enter(std::unique_lock<std::mutex>& lock, const Share& share, int64_t deadline_us,
                        const std::function<bool()>& cancelled) {
  // On every return it may be the next caller's turn.
  const OnReturn call_next([this] { CallNext(); });
  Status status = CheckTensors(share.tensor_bytes);
  if (status.ok() && (!HasRoom(share.num_requests) || !callers_.empty())) {
    status = blocks_ ? Wait(lock, share.num_requests, deadline_us, cancelled)
                     : Status::RequestDenied(DescribeQueue(share.num_requests));
    if (status.ok()) status = CheckTensors(share.tensor_bytes);
  }
  if (status.ok()) {
    num_live_ += share.num_requests;
    tensor_bytes_ += share.tensor_bytes;
  }
  return status;
}

void Admission::Leave(const Share& share) {
  num_live_ -= share.num_requests;
  tensor_bytes_ -= share.tensor_bytes;
  CallNext();
}

void Admission::Close() {
  for (Caller* caller : callers_) {
    caller->is_denied = true;
    caller->turn.notify_one();
  }
}

Status Admission::CheckTensors(int64_t bytes) const {
  if (bytes == 0 || bytes <= max_tensor_bytes_ - tensor_bytes_) return Status::Ok();
  return Status::RequestDenied("the output tensors of this request take " + std::to_string(bytes) +
                               " bytes, beside " + std::to_string(tensor_bytes_) +
                               " of others; max_output_tensor_bytes is " +
                               std::to_string(max_tensor_bytes_) +
                               (bounds_by_default_ ? ", by default an eighth of the memory" : ""));
}

Status Admission::Wait(std::unique_lock<std::mutex>& lock, int64_t num_requests,
                       int64_t deadline_us, const std::function<bool()>& cancelled) {
  Caller caller{.num_requests = num_requests};
  const auto place = callers_.insert(callers_.end(), &caller);
  const OnReturn leave([&] { callers_.erase(place); });
  return WaitForTurn(lock, caller, deadline_us, cancelled);
}

Status Admission::WaitForTurn(std::unique_lock<std::mutex>& lock, Caller& caller,
                              int64_t deadline_us, const std::function<bool()>& cancelled) {
  const auto describe = [&] { return DescribeQueue(caller.num_requests); };
  bool asked = false;  // since it was this caller's turn: a caller that gave up must not enter
  while (true) {
    if (caller.is_denied) return Status::RequestDenied("the model is stopping; " + describe());
    const bool is_turn = callers_.front() == &caller && HasRoom(caller.num_requests);
    if (is_turn && (!cancelled || asked)) return Status::Ok();
    if (!is_turn) {
      const int64_t now_us = SteadyNowUs();
      if (now_us >= deadline_us) {
        return Status(StatusCode::kDeadlineExceeded, AsStatus::kRequestDenied,
                      "timeout_ms was over while the request waited for room: " + describe());
      }
      const int64_t until_us = NextLookUs(now_us, deadline_us, static_cast<bool>(cancelled));
      caller.turn.wait_until(lock, SteadyTime(until_us));
    }
    if (!cancelled) continue;
    lock.unlock();
    const bool gives_up = cancelled();
    lock.lock();
    if (gives_up) return Status::Cancelled("the caller gave up; " + describe());
    asked = is_turn;
  }
}

void Admission::CallNext() {
  if (callers_.empty()) return;
  Caller& first = *callers_.front();
  if (HasRoom(first.num_requests)) first.turn.notify_one();
}

std::string Admission::DescribeQueue(int64_t num_requests) const {
  return std::to_string(num_waiting()) + " requests are waiting; max_waiting_requests is " +
         std::to_string(max_waiting_) +
         (num_requests == 1 ? "" : "; this one has " + std::to_string(num_requests) + " sequences");
}

}  // namespace allspark
