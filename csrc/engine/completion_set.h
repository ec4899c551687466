// The eventfd-backed set of changed queues. Queues are linked intrusively, so marking one allocates
// nothing; the set never keeps a queue alive. Lock order: a queue's mutex, then a set's.
#pragma once

#include <memory>
#include <vector>

#include "allspark/result_queue.h"
#include "base/mutex.h"
#include "platform/home_process.h"

namespace allspark {

class ResultQueueImpl;

// A queue's place in one set. The queue owns it and unlinks it before it dies.
struct CompletionHook {
  ResultQueueImpl* queue = nullptr;
  // Guarded by the set's mutex.
  CompletionHook* prev = nullptr;
  CompletionHook* next = nullptr;
  bool linked = false;
};

class CompletionSetImpl final : public CompletionSet {
 public:
  CompletionSetImpl();
  ~CompletionSetImpl() override;

  int fd() const override { return fd_; }
  std::vector<std::shared_ptr<ResultQueue>> Drain() override;
  void Attach(const std::shared_ptr<ResultQueue>& queue, bool only_end) override;

  // Links the hook if it is not. True: the set was empty, so Signal is to follow.
  [[nodiscard]] bool Link(CompletionHook& hook);
  // Makes fd() readable if a changed queue waits.
  void Signal();
  void Unlink(CompletionHook& hook);

 private:
  void UnlinkLocked(CompletionHook& hook) AS_REQUIRES(mutex_);

  const HomeProcess home_;
  int fd_;
  Mutex mutex_;
  // A list in order of first change.
  CompletionHook* head_ AS_GUARDED_BY(mutex_) = nullptr;
  CompletionHook* tail_ AS_GUARDED_BY(mutex_) = nullptr;
};

// Sets that changed and are not signalled yet. Whoever signals a set while others of its queues
// still change wakes a reader for each of them: on busy processors it runs at once.
using CompletionSets = std::vector<std::shared_ptr<CompletionSetImpl>>;

}  // namespace allspark
