// Counts the heap allocations of chosen threads (malloc and its siblings, and with them operator
// new), makes chosen ones fail, and counts the live ones. A program that uses this file gets its
// own malloc; under AddressSanitizer and ThreadSanitizer the sanitizer's hooks count instead, and
// failures cannot be injected (CanInjectFailures()).
#pragma once

#include <atomic>
#include <cstdint>

namespace allspark::testing {

// Counts one thread's allocations between Start and Stop. The watched thread calls Start and Stop
// itself, or runs inside a Scope; any thread may read count(). One counter per thread at a time.
class AllocationCounter {
 public:
  // Begins to count the calling thread's allocations, and adds them to the earlier count.
  void Start();
  // Ends counting. Requires: the calling thread called Start.
  void Stop();
  int64_t count() const { return count_.load(std::memory_order_relaxed); }
  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  void Reset() {
    count_ = 0;
    bytes_ = 0;
  }

  class Scope {
   public:
    explicit Scope(AllocationCounter* counter) : counter_(counter) { counter_->Start(); }
    ~Scope() { counter_->Stop(); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    AllocationCounter* const counter_;
  };

  // For the allocation hook.
  void Add(size_t bytes) {
    count_.fetch_add(1, std::memory_order_relaxed);
    bytes_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  }

 private:
  std::atomic<int64_t> count_{0};
  std::atomic<int64_t> bytes_{0};
};

// Adds the allocations of the thread with the system id `tid` (gettid) between Begin and End to
// *counter: for a thread whose code cannot be changed. One such thread per process.
void BeginCountingThread(int tid, AllocationCounter* counter);
void EndCountingThread();

// False under ThreadSanitizer, whose hook does not see aligned_alloc and posix_memalign.
bool SeesAlignedAllocations();
// False where a sanitizer owns malloc: tests of failures must skip, and say so.
bool CanInjectFailures();

// Refuses chosen heap allocations of the threads that entered it: malloc returns null, new throws
// bad_alloc. The heap's counterpart of FaultAllocator. Any thread may set and read it.
class HeapFaults {
 public:
  // Refuses the n-th allocation from now (1: the next); 0: none. `sticky` refuses all after it as
  // well.
  void FailNth(int64_t n, bool sticky = false);
  // Calls since the last FailNth.
  int64_t num_calls() const { return num_calls_.load(std::memory_order_relaxed); }
  int64_t num_refused() const { return num_refused_.load(std::memory_order_relaxed); }

  // The calling thread's allocations count from now on, until Leave or its end. One at a time.
  void Enter();
  void Leave();

  // A nested Scope replaces the outer one. Null: no faults.
  class Scope {
   public:
    explicit Scope(HeapFaults* faults);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    HeapFaults* const outer_;
  };

  // For the allocation hook: whether the allocation must fail.
  bool Refuses();

 private:
  std::atomic<int64_t> fail_at_{0};
  std::atomic<bool> sticky_{false};
  std::atomic<int64_t> num_calls_{0};
  std::atomic<int64_t> num_refused_{0};
};

// Allocations of the whole process that were not freed yet; only where CanInjectFailures().
int64_t NumLiveAllocations();

}  // namespace allspark::testing
