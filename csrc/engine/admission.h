// Decides which requests may join a model: the bounds on waiting requests and on output tensors,
// and the callers that wait for room. Every call is made with the mailbox's mutex held; waiting
// releases it.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>

#include "allspark/config.h"
#include "allspark/status.h"

namespace allspark {

class Admission {
 public:
  explicit Admission(const RuntimeConfig& config);

  // What a request takes from Enter to Leave.
  struct Share {
    int64_t num_requests = 0;
    int64_t tensor_bytes = 0;
  };
  // OK: there was room, and it is taken. If the queue is full and the config says so, the caller
  // waits for room: until `deadline_us`, until Close, or until `cancelled` returns true.
  // `cancelled` is called from time to time without the lock, and may be empty. Waiting callers
  // enter in the order of their arrival.
  Status Enter(std::unique_lock<std::mutex>& lock, const Share& share, int64_t deadline_us,
               const std::function<bool()>& cancelled);
  void Leave(const Share& share);
  // Denies all waiting callers.
  void Close();

  // Of requests that have entered and not left.
  int64_t num_live() const { return num_live_; }
  int64_t tensor_bytes() const { return tensor_bytes_; }
  int64_t num_blocked() const { return static_cast<int64_t>(callers_.size()); }

 private:
  struct Caller {  // on its own stack
    int64_t num_requests;
    std::condition_variable turn = {};
    bool is_denied = false;
  };

  int64_t num_waiting() const { return std::max<int64_t>(num_live_ - max_batch_, 0); }
  // One that alone is more than the bound enters where nobody else is.
  bool HasRoom(int64_t num_requests) const {
    return max_waiting_ == 0 || num_live_ == 0 ||
           num_live_ + num_requests <= max_batch_ + max_waiting_;
  }
  Status CheckTensors(int64_t bytes) const;
  Status Wait(std::unique_lock<std::mutex>& lock, int64_t num_requests, int64_t deadline_us,
              const std::function<bool()>& cancelled);
  Status WaitForTurn(std::unique_lock<std::mutex>& lock, Caller& caller, int64_t deadline_us,
                     const std::function<bool()>& cancelled);
  void CallNext();
  // num_requests: of the one that is denied.
  std::string DescribeQueue(int64_t num_requests) const;

  // Constant after construction.
  const int64_t max_batch_, max_waiting_, max_tensor_bytes_;
  const bool bounds_by_default_;  // the tensors
  const bool blocks_;

  int64_t num_live_ = 0;
  int64_t tensor_bytes_ = 0;
  std::list<Caller*> callers_;
};

}  // namespace allspark
