// Lifecycle: lets one call at a time change a model's state. A drain may take as long as its
// requests, so nobody waits for it: calls that come meanwhile are turned away. Any thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <thread>

#include "base/mutex.h"

namespace allspark {

class Lifecycle {
 public:
  // A call, from its construction to its end. Waits for the call before it, unless that drains.
  class Call {
   public:
    explicit Call(Lifecycle& lifecycle)
        : lifecycle_(lifecycle), has_entered_(lifecycle.Enter(&number_)) {}
    ~Call() {
      if (has_entered_) lifecycle_.Leave();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // False: another call drains, and this one may change nothing.
    bool has_entered() const { return has_entered_; }
    // The number of the call that drains, where this one has not entered.
    uint64_t number() const { return number_; }

   private:
    Lifecycle& lifecycle_;
    uint64_t number_ = 0;
    const bool has_entered_;
  };

  // Between these two the call that has entered waits for requests.
  void BeginDrain() AS_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    drainer_ = std::this_thread::get_id();
    changed_.notify_all();
  }
  void EndDrain() AS_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    drainer_ = std::thread::id();
  }
  // Whether this thread drains: it is within a function that its drain calls.
  bool DrainsHere() AS_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return drainer_ == std::this_thread::get_id();
  }
  // Waits until the call of this number has left.
  void Await(uint64_t number) AS_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (is_busy_ && number_ == number) changed_.wait(lock.native());
  }

 private:
  bool Enter(uint64_t* number) AS_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (is_busy_ && drainer_ == std::thread::id()) changed_.wait(lock.native());
    const bool enters = !is_busy_;
    if (enters) {
      is_busy_ = true;
      ++number_;
    }
    *number = number_;
    return enters;
  }
  void Leave() AS_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    is_busy_ = false;
    changed_.notify_all();
  }

  Mutex mutex_;
  std::condition_variable changed_;
  bool is_busy_ AS_GUARDED_BY(mutex_) = false;
  uint64_t number_ AS_GUARDED_BY(mutex_) = 0;      // of the newest call that entered
  std::thread::id drainer_ AS_GUARDED_BY(mutex_);  // nobody: no drain is under way
};

}  // namespace allspark
