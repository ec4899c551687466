#include "engine/mailbox.h"

#include <new>

#include "base/clock.h"

namespace allspark {

void StepCall::Run() {
  try {
    result_ = work_();
  } catch (...) {
    error_ = std::current_exception();
  }
}

void Mailbox::Accept() {
  MutexLock lock(mutex_);
  accepting_ = true;
}

void Mailbox::Close(StopMode mode) {
  MutexLock lock(mutex_);
  accepting_ = false;
  stopping_ = true;
  stop_mode_ = mode;
  admission_.Close();
  mail_.notify_all();
}

void Mailbox::AwaitDrain(int64_t timeout_ms, const std::function<bool()>& cancelled) {
  MutexLock lock(mutex_);
  const int64_t deadline_us = DeadlineUs(timeout_ms);
  while (stopping_) {
    const int64_t now_us = SteadyNowUs();
    bool is_over = now_us >= deadline_us;
    if (cancelled && !is_over) {
      lock.native().unlock();
      is_over = cancelled();
      lock.native().lock();
    }
    if (is_over) return CutShort();
    const int64_t until_us = NextLookUs(now_us, deadline_us, static_cast<bool>(cancelled));
    loop_ended_.wait_until(lock.native(), SteadyTime(until_us));
  }
}

void Mailbox::CutShort() {
  stop_mode_ = StopMode::kCancel;
  mail_.notify_all();
}

void Mailbox::CutDrainShort() {
  MutexLock lock(mutex_);
  if (stopping_) CutShort();
}

Status Mailbox::Submit(const std::shared_ptr<Request>& request,
                       const std::function<bool()>& cancelled) {
  MutexLock lock(mutex_);
  AS_RETURN_IF_ERROR(CheckAccepting("a request"));
  const Status entered =
      admission_.Enter(lock.native(), request->share(), request->spec.deadline_us, cancelled);
  if (!entered.ok()) {
    if (entered.as_status() == AsStatus::kRequestDenied) statistics_.OnDenied();
    return entered;
  }
  try {
    Enlist(request);
  } catch (...) {
    admission_.Leave(request->share());
    throw;
  }
  request->self = request;
  (new_tail_ != nullptr ? new_tail_->next_new : new_head_) = request.get();
  new_tail_ = request.get();
  mail_.notify_one();
  return Status::Ok();
}

void Mailbox::Enlist(const std::shared_ptr<Request>& request) {
  try {
    requests_.emplace(request->spec.request_id, request);
    if (request->group != nullptr) {
      for (const Request* other : request->group->returned().subspan(1)) {
        requests_.emplace(other->spec.request_id, request);
      }
    }
    if (request->spec.deadline_us != kNoDeadline) {
      deadlines_.emplace(request->spec.deadline_us, request.get());
    }
  } catch (...) {
    Delist(*request);
    throw;
  }
}

void Mailbox::Delist(const Request& request) {
  requests_.erase(request.spec.request_id);
  if (request.group == nullptr) return;
  for (const Request* other : request.group->returned()) requests_.erase(other->spec.request_id);
}

Status Mailbox::CheckAccepting(const char* what) const {
  if (accepting_) return Status::Ok();
  if (state_ == ModelState::kRunning) {
    return Status::RequestDenied("model '" + model_name_ + "' is stopping and takes no requests");
  }
  return Status::FailedPrecondition("model '" + model_name_ + "' is " +
                                    std::string(ModelStateName(state_.load())) + "; " + what +
                                    " needs it Running");
}

Result<std::shared_ptr<Request>> Mailbox::Find(RequestHandle handle) const {
  const auto it = requests_.find(handle.id);
  if (it == requests_.end()) {
    return Status(StatusCode::kNotFound, AsStatus::kIllegalRequestId,
                  "model '" + model_name_ + "' has no request " + std::to_string(handle.id) +
                      "; it was released, or is another model's");
  }
  return it->second;
}

void Mailbox::PostStop(const std::shared_ptr<Request>& request, FinishReason reason) {
  if (request->ended || request->stop_self != nullptr) return;
  request->stop_self = request;
  request->stop_reason = reason;
  request->next_stop = stop_head_;
  stop_head_ = request.get();
  mail_.notify_one();
}

Status Mailbox::Stop(RequestHandle handle, FinishReason reason) {
  MutexLock lock(mutex_);
  AS_ASSIGN_OR_RETURN(const std::shared_ptr<Request> request, Find(handle));
  // A group that is stopped gives nothing, so it was cancelled.
  PostStop(request, request->group == nullptr ? reason : FinishReason::kCancelled);
  return Status::Ok();
}

Status Mailbox::Release(RequestHandle handle) {
  std::shared_ptr<Request> released;  // dies after the lock
  MutexLock lock(mutex_);
  AS_ASSIGN_OR_RETURN(released, Find(handle));
  PostStop(released, FinishReason::kCancelled);
  requests_.erase(handle.id);
  return Status::Ok();
}

Result<std::shared_ptr<ResultQueueImpl>> Mailbox::QueueOf(RequestHandle handle) const {
  MutexLock lock(mutex_);
  AS_ASSIGN_OR_RETURN(const std::shared_ptr<Request> request, Find(handle));
  return request->queue;
}

std::vector<std::shared_ptr<ResultQueueImpl>> Mailbox::Queues() const {
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<ResultQueueImpl>> queues;
  queues.reserve(requests_.size());
  for (const auto& [id, request] : requests_) queues.push_back(request->queue);
  return queues;
}

Result<int64_t> Mailbox::Call(const char* what, std::function<Result<int64_t>()> work) {
  StepCall call(std::move(work));
  {
    MutexLock lock(mutex_);
    AS_RETURN_IF_ERROR(CheckAccepting(what));
    call.next_ = std::exchange(calls_, &call);
    mail_.notify_one();
    while (!call.done_) calls_done_.wait(lock.native());
  }
  if (call.error_ == nullptr) return std::move(call.result_);
  try {
    std::rethrow_exception(call.error_);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return Status::Internal(error.what());
  }
}

Mailbox::Counts Mailbox::counts() const {
  MutexLock lock(mutex_);
  return {admission_.num_live(), admission_.num_blocked(), admission_.tensor_bytes()};
}

bool Mailbox::IsMailThere() const {
  return new_head_ != nullptr || stop_head_ != nullptr || calls_ != nullptr || stopping_;
}

bool Mailbox::HasMail() const {
  MutexLock lock(mutex_);
  return IsMailThere();
}

Mailbox::Mail Mailbox::Take(bool has_work, bool has_memory) {
  MutexLock lock(mutex_);
  while (!has_work && !IsMailThere()) {
    // With memory, requests are work, and the loop sees their deadlines. Without it, only this
    // wait does.
    if (has_memory || deadlines_.empty()) {
      mail_.wait(lock.native());
      continue;
    }
    const auto deadline = SteadyTime(deadlines_.begin()->first);
    if (mail_.wait_until(lock.native(), deadline) == std::cv_status::timeout) break;
  }
  Mail mail;
  mail.added = std::exchange(new_head_, nullptr);
  new_tail_ = nullptr;
  mail.stopped = std::exchange(stop_head_, nullptr);
  mail.ends =
      stopping_ && (stop_mode_ == StopMode::kCancel || (mail.added == nullptr && !has_work));
  // At the end CloseLoop refuses the calls.
  if (!mail.ends) mail.calls = std::exchange(calls_, nullptr);
  return mail;
}

void Mailbox::Answer(StepCall* calls, const std::function<void()>& before_done) {
  if (calls == nullptr) return;
  for (StepCall* call = calls; call != nullptr; call = call->next_) call->Run();
  before_done();
  MutexLock lock(mutex_);
  FinishCalls(calls);
}

void Mailbox::FinishCalls(StepCall* calls) {
  while (calls != nullptr) {
    StepCall* const next = calls->next_;
    calls->done_ = true;
    calls = next;
  }
  calls_done_.notify_all();
}

void Mailbox::DropStops(Request* head) {
  while (head != nullptr) {
    Request* next = head->next_stop;
    head->stop_self.reset();  // may be the last reference
    head = next;
  }
}

void Mailbox::DropStops() {
  MutexLock lock(mutex_);
  DropStops(std::exchange(stop_head_, nullptr));
}

Request* Mailbox::Expired(int64_t now_us) const {
  MutexLock lock(mutex_);
  for (const auto& [deadline_us, request] : deadlines_) {
    if (deadline_us > now_us) break;
    // A request that is still in the mailbox is linked there, and must stay.
    if (request->joined) return request;
  }
  return nullptr;
}

bool Mailbox::End(Request& request) {
  MutexLock lock(mutex_);
  if (request.ended) return false;
  request.ended = true;
  admission_.Leave(request.share());
  if (request.spec.deadline_us != kNoDeadline)
    deadlines_.erase({request.spec.deadline_us, &request});
  return true;
}

void Mailbox::EndSample() {
  MutexLock lock(mutex_);
  admission_.Leave({.num_requests = 1});
}

void Mailbox::CloseLoop() {
  // The notifications stay under the lock: once it is released, the mailbox may be destroyed.
  MutexLock lock(mutex_);
  for (StepCall* call = calls_; call != nullptr; call = call->next_) {
    try {
      call->result_ = Status::RequestDenied("model '" + model_name_ + "' is stopping");
    } catch (...) {
      call->error_ = std::current_exception();
    }
  }
  FinishCalls(std::exchange(calls_, nullptr));
  stopping_ = false;
  loop_ended_.notify_all();
}

}  // namespace allspark
