// A mutex and its lock whose use clang checks (-Wthread-safety): libstdc++'s own say nothing of
// what they guard. GCC ignores the annotations.
#pragma once

#include <mutex>

#ifdef __clang__
#define AS_THREAD_ANNOTATION(annotation) __attribute__((annotation))
#else
#define AS_THREAD_ANNOTATION(annotation)
#endif
// Of a member: it is read and written with `mutex` held alone.
#define AS_GUARDED_BY(mutex) AS_THREAD_ANNOTATION(guarded_by(mutex))
// Of a function: its caller holds, or does not hold, the mutex.
#define AS_REQUIRES(...) AS_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define AS_EXCLUDES(...) AS_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))

namespace allspark {

class AS_THREAD_ANNOTATION(capability("mutex")) Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds a mutex from its construction to its end.
class AS_THREAD_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) AS_THREAD_ANNOTATION(acquire_capability(mutex))
      : lock_(mutex.mutex_) {}
  ~MutexLock() AS_THREAD_ANNOTATION(release_capability()) {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  // For a condition variable, which releases the mutex while it waits.
  std::unique_lock<std::mutex>& native() { return lock_; }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace allspark
