#include "engine/completion_set.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/check.h"
#include "engine/result_queue_impl.h"

namespace allspark {

std::shared_ptr<CompletionSet> CompletionSet::Create() {
  return std::make_shared<CompletionSetImpl>();
}

CompletionSetImpl::CompletionSetImpl() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  AS_CHECK(fd_ >= 0) << "eventfd failed: " << std::generic_category().message(errno);
}

CompletionSetImpl::~CompletionSetImpl() { close(fd_); }

std::vector<std::shared_ptr<ResultQueue>> CompletionSetImpl::Drain() {
  std::vector<std::shared_ptr<ResultQueue>> changed;
  // A fork shares the descriptor: a signal that it read would never reach the engine's process.
  if (!home_.IsHere()) return changed;
  MutexLock lock(mutex_);
  // Reserved first: if there is no memory for the list, no queue leaves the set.
  size_t count_changed = 0;
  for (const CompletionHook* hook = head_; hook != nullptr; hook = hook->next) ++count_changed;
  changed.reserve(count_changed);
  // Cleared under the lock: a Link after this drain asks for a signal because the list is empty
  // then.
  uint64_t count = 0;
  [[maybe_unused]] ssize_t n = read(fd_, &count, sizeof count);
  while (head_ != nullptr) {
    // A queue whose last owner is gone is being destroyed right now and waits for our mutex.
    std::shared_ptr<ResultQueue> queue = head_->queue->weak_from_this().lock();
    UnlinkLocked(*head_);
    if (queue != nullptr) changed.push_back(std::move(queue));
  }
  return changed;
}

void CompletionSetImpl::Attach(const std::shared_ptr<ResultQueue>& queue, bool only_end) {
  auto* impl = dynamic_cast<ResultQueueImpl*>(queue.get());
  AS_CHECK(impl != nullptr) << "CompletionSet::Attach: not a queue of an engine";
  impl->AttachSet(std::static_pointer_cast<CompletionSetImpl>(shared_from_this()), only_end);
}

bool CompletionSetImpl::Link(CompletionHook& hook) {
  MutexLock lock(mutex_);
  if (hook.linked) return false;
  const bool was_empty = head_ == nullptr;
  hook.linked = true;
  hook.next = nullptr;
  hook.prev = tail_;
  (tail_ != nullptr ? tail_->next : head_) = &hook;
  tail_ = &hook;
  return was_empty;
}

void CompletionSetImpl::Signal() {
  MutexLock lock(mutex_);
  if (head_ == nullptr) return;  // drained already
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(fd_, &one, sizeof one);
}

void CompletionSetImpl::Unlink(CompletionHook& hook) {
  MutexLock lock(mutex_);
  UnlinkLocked(hook);
}

void CompletionSetImpl::UnlinkLocked(CompletionHook& hook) {
  if (!hook.linked) return;
  (hook.prev != nullptr ? hook.prev->next : head_) = hook.next;
  (hook.next != nullptr ? hook.next->prev : tail_) = hook.prev;
  hook.linked = false;
  hook.prev = hook.next = nullptr;
}

}  // namespace allspark
