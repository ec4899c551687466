// A pinned compute pool and ParallelFor. One pool per device, shared by the step threads of its
// models: regions of different callers run one after the other. The caller is worker 0.
// Workers spin briefly between regions of one step and sleep when idle; an idle pool uses no CPU.
#pragma once

#include <cstdint>
#include <memory>
#include <system_error>
#include <type_traits>
#include <vector>

#include "allspark/status.h"
#include "platform/home_process.h"

namespace allspark {

// A non-owning reference to a callable; costs two pointers and never allocates.
template <typename Signature>
class FunctionRef;
template <typename R, typename... Args>
class FunctionRef<R(Args...)> {
 public:
  template <typename F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
  FunctionRef(F&& f)  // NOLINT: implicit by design.
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(static_cast<Args>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(object_, static_cast<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

class ThreadPool {
 public:
  // num_threads includes the caller of ParallelFor; 0: CpuCount(). `pin` gives each worker one core
  // of this process's affinity mask.
  explicit ThreadPool(int num_threads, bool pin = true);
  // A thread for each of `cores`, which its worker has alone. caller_cores: where callers may be;
  // the first of `cores` is one of them.
  ThreadPool(std::vector<int> cores, std::vector<int> caller_cores);
  // In a fork, which has no workers to wait for, it ends nothing.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Binds the calling thread to the cores of its affinity mask, or of caller_cores, that have no
  // pinned worker; for a thread that calls ParallelFor for as long as it lives. On a worker's core,
  // each of the two may spin for a time slice while it waits for the other. Threads that it creates
  // inherit the mask.
  void KeepCallerOffWorkers() const;

  // Splits [0, n) into num_threads() contiguous parts, the same every time for the same n, and runs
  // fn(begin, end, part) for each non-empty part; returns when all have. Each thread begins with
  // its own part and then takes those that others have not begun, so nobody is waited for whose
  // core somebody else uses. n <= grain runs on the caller alone. Allocates nothing. The exception
  // of the first part that failed is rethrown here after all parts have ended.
  void ParallelFor(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t, int)> fn);
  // For items that take long: runs fn(item, thread) for each of [0, n). Items are split as by
  // ParallelFor, but a thread that has finished its own takes the last ones of others, one at a
  // time (work stealing). So a core that something else slows down delays the rest by one item at
  // most. n < 2^31.
  //
  // Of calls that run at the same time, no two have the same `part` or `thread`, which are below
  // num_threads(): scratch memory by either is one's own. Within fn, both calls run on its thread
  // alone, with its `part` or `thread`.
  void ParallelForItems(int64_t n, FunctionRef<void(int64_t, int)> fn);
  // Runs fn(thread) once on each thread, and none for another: for memory that belongs to those who
  // touch it first. Not within a region.
  void ForEachThread(FunctionRef<void(int)> fn);

 private:
  class Impl;
  const HomeProcess home_;
  std::unique_ptr<Impl> impl_;
};

// For a pool of so many threads whose constructor threw.
Status NoMoreThreads(int num_threads, const std::system_error& error);

}  // namespace allspark
