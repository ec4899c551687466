// Between a model's callers and its step thread: the live requests by handle, new ones, stops, and
// calls that the step thread answers between two steps. What goes the other way, results, is the
// queues'. All other locking between the two is here.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allspark/engine.h"
#include "base/mutex.h"
#include "engine/admission.h"
#include "engine/request.h"
#include "engine/statistics.h"

namespace allspark {

// A call that the step thread answers between two steps; it is on its caller's stack.
class StepCall {
 public:
  explicit StepCall(std::function<Result<int64_t>()> work) : work_(std::move(work)) {}

 private:
  friend class Mailbox;
  void Run();

  std::function<Result<int64_t>()> work_;
  Result<int64_t> result_ = int64_t{0};
  std::exception_ptr error_ = nullptr;  // what `work` threw; the caller deals with it
  bool done_ = false;                   // guarded by the mailbox's mutex
  StepCall* next_ = nullptr;
};

class Mailbox {
 public:
  // `state`: the model's, for refusals; it becomes Running after Accept, and ceases to be after
  // CloseLoop. `statistics` counts the requests that admission denies.
  Mailbox(const RuntimeConfig& config, const std::atomic<ModelState>& state, Statistics& statistics)
      : model_name_(config.model_name),
        state_(state),
        statistics_(statistics),
        admission_(config) {}

  // The model's life. Accept: the step thread runs, and requests are taken. Close: nothing is taken
  // from now on, and the loop ends: at once, or with kDrain after all requests. AwaitDrain waits
  // for that; the drain becomes a cancel when timeout_ms >= 0 is over, or when `cancelled`, which
  // is called from time to time, returns true. CutDrainShort makes it one now.
  void Accept() AS_EXCLUDES(mutex_);
  void Close(StopMode mode) AS_EXCLUDES(mutex_);
  void AwaitDrain(int64_t timeout_ms, const std::function<bool()>& cancelled) AS_EXCLUDES(mutex_);
  void CutDrainShort() AS_EXCLUDES(mutex_);

  // Callers' calls. Submit waits for room if the config says so (Admission::Enter).
  Status Submit(const std::shared_ptr<Request>& request, const std::function<bool()>& cancelled)
      AS_EXCLUDES(mutex_);
  // `reason`: kCancelled or kStop.
  Status Stop(RequestHandle handle, FinishReason reason) AS_EXCLUDES(mutex_);
  // Stops the request and forgets its handle.
  Status Release(RequestHandle handle) AS_EXCLUDES(mutex_);
  Result<std::shared_ptr<ResultQueueImpl>> QueueOf(RequestHandle handle) const AS_EXCLUDES(mutex_);
  std::vector<std::shared_ptr<ResultQueueImpl>> Queues() const AS_EXCLUDES(mutex_);
  // Has the step thread run `work` between two steps, and returns what it returned. `what` names
  // the call in the message of a refusal.
  Result<int64_t> Call(const char* what, std::function<Result<int64_t>()> work) AS_EXCLUDES(mutex_);
  struct Counts {
    int64_t num_live = 0;     // requests that were accepted and have not ended
    int64_t num_blocked = 0;  // callers that wait for room
    int64_t tensor_bytes = 0;
  };
  Counts counts() const AS_EXCLUDES(mutex_);

  // The step thread's calls.
  struct Mail {
    Request* added = nullptr;    // linked by next_new
    Request* stopped = nullptr;  // linked by next_stop; DropStops comes afterwards
    StepCall* calls = nullptr;   // Answer comes next
    bool ends = false;           // the loop is over, once `added` are in the scheduler
  };
  // Waits for mail, unless the loop has work. While it has not even memory for work, deadlines end
  // the wait, too.
  Mail Take(bool has_work, bool has_memory) AS_EXCLUDES(mutex_);
  bool HasMail() const AS_EXCLUDES(mutex_);
  // Runs the calls; their callers go on once `before_done` has returned.
  void Answer(StepCall* calls, const std::function<void()>& before_done) AS_EXCLUDES(mutex_);
  // Drops a list of stops that Take gave.
  static void DropStops(Request* head);
  // Drops the stops that have not been taken.
  void DropStops() AS_EXCLUDES(mutex_);
  // A request that joined the scheduler and whose deadline is over; null: there is none.
  Request* Expired(int64_t now_us) const AS_EXCLUDES(mutex_);
  // The request ends; false: it had ended before.
  bool End(Request& request) AS_EXCLUDES(mutex_);
  // One sample of a group has ended, others have not.
  void EndSample() AS_EXCLUDES(mutex_);
  // The loop has ended, and so have all requests. The mailbox may be destroyed from then on.
  void CloseLoop() AS_EXCLUDES(mutex_);

 private:
  Status CheckAccepting(const char* what) const AS_REQUIRES(mutex_);
  Result<std::shared_ptr<Request>> Find(RequestHandle handle) const AS_REQUIRES(mutex_);
  // Adds the request where handles and deadlines find it; all of it or nothing.
  void Enlist(const std::shared_ptr<Request>& request) AS_REQUIRES(mutex_);
  void Delist(const Request& request) AS_REQUIRES(mutex_);
  void PostStop(const std::shared_ptr<Request>& request, FinishReason reason) AS_REQUIRES(mutex_);
  // A drain becomes a cancel.
  void CutShort() AS_REQUIRES(mutex_);
  void FinishCalls(StepCall* calls) AS_REQUIRES(mutex_);
  bool IsMailThere() const AS_REQUIRES(mutex_);

  const std::string model_name_;
  const std::atomic<ModelState>& state_;
  Statistics& statistics_;

  mutable Mutex mutex_;
  std::condition_variable mail_;
  std::condition_variable loop_ended_;
  std::condition_variable calls_done_;
  // By handle: live requests, and ended ones that were not released.
  std::unordered_map<uint64_t, std::shared_ptr<Request>> requests_ AS_GUARDED_BY(mutex_);
  Request* new_head_ AS_GUARDED_BY(mutex_) = nullptr;
  Request* new_tail_ AS_GUARDED_BY(mutex_) = nullptr;
  Request* stop_head_ AS_GUARDED_BY(mutex_) = nullptr;
  StepCall* calls_ AS_GUARDED_BY(mutex_) = nullptr;
  bool accepting_ AS_GUARDED_BY(mutex_) = false;
  bool stopping_ AS_GUARDED_BY(mutex_) = false;  // from Close to CloseLoop
  StopMode stop_mode_ AS_GUARDED_BY(mutex_) = StopMode::kCancel;
  Admission admission_ AS_GUARDED_BY(mutex_);
  // Of live requests that have one.
  std::set<std::pair<int64_t, Request*>> deadlines_ AS_GUARDED_BY(mutex_);
};

}  // namespace allspark
