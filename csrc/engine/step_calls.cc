// ModelInstance's calls that are answered between two steps: on the prefix cache and on memory.
// Only the step thread may touch what they use, so a caller posts its call and sleeps until the
// step thread has answered it.

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "engine/model_instance.h"

namespace allspark {

struct ModelInstance::StepCall {
  std::function<Result<int64_t>()> work;
  Result<int64_t> result = int64_t{0};
  std::exception_ptr error = nullptr;  // what `work` threw; the caller deals with it
  bool done = false;                   // guarded by mutex_
  StepCall* next = nullptr;
};

Result<int64_t> ModelInstance::CallStepThread(const char* what,
                                              std::function<Result<int64_t>()> work) {
  StepCall call{.work = std::move(work)};
  std::unique_lock lock(mutex_);
  AS_RETURN_IF_ERROR(CheckAcceptingLocked(what));
  call.next = std::exchange(step_calls_, &call);
  mail_.notify_one();
  step_calls_done_.wait(lock, [&] { return call.done; });
  lock.unlock();
  if (call.error == nullptr) return std::move(call.result);
  try {
    std::rethrow_exception(call.error);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return Status::Internal(error.what());
  }
}

void ModelInstance::AnswerStepCalls(StepCall* calls) {
  if (calls == nullptr) return;
  for (StepCall* call = calls; call != nullptr; call = call->next) {
    try {
      call->result = call->work();
    } catch (...) {
      call->error = std::current_exception();
    }
  }
  PublishUsage();
  std::lock_guard lock(mutex_);
  FinishStepCallsLocked(calls);
}

void ModelInstance::FailStepCallsLocked() {
  for (StepCall* call = step_calls_; call != nullptr; call = call->next) {
    try {
      call->result = Status::RequestDenied("model '" + config_.model_name + "' is stopping");
    } catch (...) {
      call->error = std::current_exception();
    }
  }
  FinishStepCallsLocked(std::exchange(step_calls_, nullptr));
}

void ModelInstance::FinishStepCallsLocked(StepCall* calls) {
  for (StepCall* call = calls; call != nullptr; call = call->next) call->done = true;
  step_calls_done_.notify_all();
}

}  // namespace allspark
