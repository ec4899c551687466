#include "platform/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/clock.h"
#include "platform/affinity.h"
#include "platform/float_mode.h"
#include "platform/system_limits.h"

namespace allspark {

namespace {

constexpr size_t kCacheLine = 64;
// How long a waiting thread spins before it sleeps. The regions of one step follow each other
// faster than this; waking a sleeper for each would cost a system call and a pass of the scheduler.
constexpr int64_t kSpinNs = 200'000;
constexpr int kPausesPerClockRead = 32;

void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `ready` is true, for about spin_ns; returns its last answer.
template <typename Ready>
bool SpinUntil(int64_t spin_ns, Ready ready) {
  if (ready()) return true;
  if (spin_ns <= 0) return false;
  const int64_t deadline = SteadyNowNs() + spin_ns;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      CpuRelax();
      if (ready()) return true;
    }
  } while (SteadyNowNs() < deadline);
  return false;
}

// The kernel sees the word, not the C++ object.
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Sleeps while `word` is `expected`; may wake for no reason.
void FutexWait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
// There is at most one sleeper per word.
void FutexWake(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

// Part `index` of `parts` of [0, n): the first n % parts of them are longer by one.
struct Range {
  int64_t begin, end;
};
Range PartOf(int64_t n, int64_t parts, int64_t index) {
  const int64_t size = n / parts;
  const int64_t longer = n % parts;
  const int64_t begin = index * size + std::min(index, longer);
  return {begin, begin + size + (index < longer ? 1 : 0)};
}

// Whether others take a thread's items that it has not begun.
enum class Stealing : bool { kNo, kYes };

// Items of a region that a thread still has to begin, [begin, end) in one word: the thread takes
// the first, others the last, unless the word says that they must not.
class ItemRange {
 public:
  void Set(Range range, Stealing stealing) {
    word_.store(static_cast<uint64_t>(range.begin) << 32 | static_cast<uint64_t>(range.end) |
                    (stealing == Stealing::kYes ? 0 : kOwn),
                std::memory_order_release);
  }
  bool TakeFirst(int64_t* item) { return Take(item, uint64_t{1} << 32, /*first=*/true); }
  bool TakeLast(int64_t* item) { return Take(item, ~uint64_t{0}, /*first=*/false); }

 private:
  static constexpr uint64_t kOwn = uint64_t{1} << 31;

  // `step` is what taking an item adds to the word.
  bool Take(int64_t* item, uint64_t step, bool first) {
    uint64_t word = word_.load(std::memory_order_relaxed);
    do {
      const uint64_t begin = word >> 32, end = word & (kOwn - 1);
      if (begin >= end || (!first && (word & kOwn) != 0)) return false;
      *item = static_cast<int64_t>(first ? begin : end - 1);
    } while (!word_.compare_exchange_weak(word, word + step, std::memory_order_acquire,
                                          std::memory_order_relaxed));
    return true;
  }

  std::atomic<uint64_t> word_{0};
};

}  // namespace

// How a region runs. The caller writes the region, gives each thread its items, and announces it by
// changing word_, which holds the region's number and how many threads have items. A region is over
// when all its items have run, whoever ran them: a worker whose core somebody else uses is not
// waited for unless it is within an item, and the caller can run all of them itself. Such a worker
// may come late and take an item of a later region; it looks at the region only after it has taken
// an item, which keeps that region from ending.
//
// How a worker sleeps. It raises num_sleepers_ and its own `asleep`, looks at word_ once more, and
// sleeps on `asleep`. The caller changes word_, then looks at num_sleepers_. All four are
// sequentially consistent, so at least one of the two sees the other.
class ThreadPool::Impl {
 public:
  // Thread `id` is pinned to cores[id], unless there are fewer cores than threads.
  Impl(int num_threads, bool pin, const std::vector<int>& cores, std::vector<int> caller_cores);
  ~Impl() { Stop(); }

  int num_threads() const { return num_threads_; }
  void KeepCallerOffWorkers() const;
  using Function = FunctionRef<void(int64_t, int64_t, int)>;
  using ItemFunction = FunctionRef<void(int64_t, int)>;  // item, thread

  void ParallelFor(int64_t n, int64_t grain, Function fn);
  void ParallelForItems(int64_t n, ItemFunction fn);
  void ForEachThread(FunctionRef<void(int)> fn);

 private:
  struct alignas(kCacheLine) Worker {
    ItemRange items;
    // Its thread's: how many items of which region it has run, as (region << 32 | count).
    alignas(kCacheLine) std::atomic<uint64_t> finished{0};
    alignas(kCacheLine) std::atomic<uint32_t> asleep{0};
    // Of the first item that failed on it. Written by its thread within a region, read by the
    // caller after it.
    std::exception_ptr error;
    int64_t failed_item = 0;
    std::thread thread;
  };

  // The low bits of word_: threads that have items, or kStop.
  static constexpr int kPartsBits = 16;
  static constexpr uint64_t kPartsMask = (uint64_t{1} << kPartsBits) - 1;
  static constexpr uint64_t kStop = kPartsMask;

  void PinWorker(int id, const std::vector<int>& cores);
  void WorkerLoop(int id);
  uint64_t WaitForChange(Worker& self, uint64_t seen);
  // Runs fn(item, thread) for each of [0, n), on up to `parts` threads.
  void RunRegion(int64_t n, int parts, ItemFunction fn, Stealing stealing = Stealing::kYes);
  // Runs a thread's own items, then those that others have not begun.
  void RunItems(int id, int parts);
  void RunItem(int64_t item, int id);
  void Publish(uint64_t parts);
  bool IsFinished(int64_t n) const;  // all n items of the region
  void WaitForOthers(int64_t n);
  void RethrowFirstError();
  void Stop();

  // Constant after construction.
  int num_threads_;
  int64_t spin_ns_;
  std::vector<int> caller_cores_;  // empty: those of the caller's affinity mask
  std::vector<int> worker_cores_;  // ascending; those of pinned workers
  std::vector<Worker> workers_;    // [num_threads]; entry 0 is the caller and has no thread.

  std::mutex caller_mutex_;  // One region at a time.

  // The region, written by the caller before any thread has items, and constant until all have run.
  const ItemFunction* fn_ = nullptr;
  uint32_t region_ = 0;  // its number

  alignas(kCacheLine) std::atomic<uint64_t> word_{0};
  alignas(kCacheLine) std::atomic<uint32_t> num_sleepers_{0};
  alignas(kCacheLine) std::atomic<uint32_t> caller_asleep_{0};
  std::atomic<bool> failed_{false};
};

namespace {

// The region this thread is inside of, for nested calls.
struct CurrentRegion {
  const void* pool = nullptr;
  int slot = 0;
};
thread_local CurrentRegion current_region;

// Marks this thread as inside a region for the life of the object.
class RegionScope {
 public:
  RegionScope(const void* pool, int slot) : outer_(current_region) {
    current_region = {pool, slot};
  }
  ~RegionScope() { current_region = outer_; }
  RegionScope(const RegionScope&) = delete;
  RegionScope& operator=(const RegionScope&) = delete;

 private:
  CurrentRegion outer_;
};

}  // namespace

ThreadPool::Impl::Impl(int num_threads, bool pin, const std::vector<int>& cores,
                       std::vector<int> caller_cores)
    : num_threads_(num_threads), caller_cores_(std::move(caller_cores)) {
  AS_CHECK(num_threads >= 1 && static_cast<uint64_t>(num_threads) < kStop)
      << "num_threads is " << num_threads;
  const bool enough_cores = static_cast<size_t>(num_threads) <= cores.size();
  // With more threads than cores, spinning takes the core from the thread that is waited for.
  spin_ns_ = enough_cores && CpuCount() >= num_threads ? kSpinNs : 0;
  workers_ = std::vector<Worker>(static_cast<size_t>(num_threads));
  // Signals are the application's: its handlers must run on its threads, not in a kernel.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int id = 1; id < num_threads; ++id) {
      std::thread& thread = workers_[static_cast<size_t>(id)].thread;
      thread = std::thread([this, id] { WorkerLoop(id); });
      pthread_setname_np(thread.native_handle(), ("as-pool-" + std::to_string(id)).c_str());
      // The first core is left to the callers. A refused pin costs speed only.
      if (pin && enough_cores) PinWorker(id, cores);
    }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    Stop();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  std::sort(worker_cores_.begin(), worker_cores_.end());
}

void ThreadPool::Impl::PinWorker(int id, const std::vector<int>& cores) {
  const auto index = static_cast<size_t>(id);
  if (PinThread(workers_[index].thread.native_handle(), {cores[index]})) {
    worker_cores_.push_back(cores[index]);
  }
}

void ThreadPool::Impl::KeepCallerOffWorkers() const try {
  std::vector<int> others;
  const std::vector<int> cores = caller_cores_.empty() ? AffinityCores() : caller_cores_;
  std::set_difference(cores.begin(), cores.end(), worker_cores_.begin(), worker_cores_.end(),
                      std::back_inserter(others));
  const bool is_bound = !caller_cores_.empty() || others.size() < cores.size();
  if (!others.empty() && is_bound) PinThread(pthread_self(), others);
} catch (const std::bad_alloc&) {
  // It only costs speed.
}

void ThreadPool::Impl::Stop() {
  Publish(kStop);
  for (Worker& worker : workers_) {
    if (worker.thread.joinable()) worker.thread.join();
  }
}

void ThreadPool::Impl::Publish(uint64_t parts) {
  const uint64_t region = (word_.load(std::memory_order_relaxed) >> kPartsBits) + 1;
  word_.store(region << kPartsBits | parts, std::memory_order_seq_cst);
  if (num_sleepers_.load(std::memory_order_seq_cst) == 0) return;
  const size_t end = std::min(static_cast<size_t>(parts), workers_.size());
  for (size_t id = 1; id < end; ++id) {
    if (workers_[id].asleep.load(std::memory_order_seq_cst) == 0) continue;
    if (workers_[id].asleep.exchange(0, std::memory_order_seq_cst) == 1) {
      FutexWake(&workers_[id].asleep);
    }
  }
}

uint64_t ThreadPool::Impl::WaitForChange(Worker& self, uint64_t seen) {
  uint64_t word = seen;
  const auto changed = [&] {
    word = word_.load(std::memory_order_acquire);
    return word != seen;
  };
  while (!SpinUntil(spin_ns_, changed)) {
    num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
    self.asleep.store(1, std::memory_order_seq_cst);
    word = word_.load(std::memory_order_seq_cst);
    // A region that this worker has no part in leaves it asleep; it then skips to the newest.
    while (word == seen && self.asleep.load(std::memory_order_seq_cst) == 1) {
      FutexWait(&self.asleep, 1);
      word = word_.load(std::memory_order_seq_cst);
    }
    self.asleep.store(0, std::memory_order_seq_cst);
    num_sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    if (word != seen) return word;
  }
  return word;
}

void ThreadPool::Impl::WorkerLoop(int id) {
  const DefaultFloatMode mode;
  Worker& self = workers_[static_cast<size_t>(id)];
  uint64_t seen = 0;
  while (true) {
    seen = WaitForChange(self, seen);
    const uint64_t parts = seen & kPartsMask;
    if (parts == kStop) return;
    if (static_cast<uint64_t>(id) >= parts) continue;
    RunItems(id, static_cast<int>(parts));
    // After `finished`, before the look at caller_asleep_; the caller does it the other way round.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (caller_asleep_.load(std::memory_order_relaxed) != 0 &&
        caller_asleep_.exchange(0, std::memory_order_seq_cst) != 0) {
      FutexWake(&caller_asleep_);
    }
  }
}

void ThreadPool::Impl::RunItems(int id, int parts) {
  int64_t item = 0;
  while (workers_[static_cast<size_t>(id)].items.TakeFirst(&item)) RunItem(item, id);
  for (int other = id + 1; other < id + parts; ++other) {
    ItemRange& items = workers_[static_cast<size_t>(other % parts)].items;
    while (items.TakeLast(&item)) RunItem(item, id);
  }
}

void ThreadPool::Impl::RunItem(int64_t item, int id) {
  Worker& self = workers_[static_cast<size_t>(id)];
  const uint64_t region = uint64_t{region_} << 32;
  const uint64_t finished = self.finished.load(std::memory_order_relaxed);
  try {
    (*fn_)(item, id);
  } catch (...) {
    if (self.error == nullptr || item < self.failed_item) {
      self.error = std::current_exception();
      self.failed_item = item;
    }
    failed_.store(true, std::memory_order_relaxed);
  }
  // Nothing of the region may be touched after this.
  const uint64_t before = (finished ^ region) >> 32 == 0 ? finished : region;
  self.finished.store(before + 1, std::memory_order_release);
}

bool ThreadPool::Impl::IsFinished(int64_t n) const {
  int64_t sum = 0;
  for (const Worker& worker : workers_) {
    const uint64_t finished = worker.finished.load(std::memory_order_acquire);
    if (finished >> 32 == region_) sum += static_cast<int64_t>(finished & 0xffffffffu);
  }
  return sum == n;
}

void ThreadPool::Impl::WaitForOthers(int64_t n) {
  if (SpinUntil(spin_ns_, [&] { return IsFinished(n); })) return;
  while (true) {
    caller_asleep_.store(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (IsFinished(n)) break;
    FutexWait(&caller_asleep_, 1);
  }
  caller_asleep_.store(0, std::memory_order_relaxed);
}

// That of the first item: which one it is does not depend on time.
void ThreadPool::Impl::RethrowFirstError() {
  if (!failed_.load(std::memory_order_relaxed)) return;
  failed_.store(false, std::memory_order_relaxed);
  std::exception_ptr first;
  int64_t first_item = 0;
  for (Worker& worker : workers_) {
    std::exception_ptr error = std::move(worker.error);
    worker.error = nullptr;
    if (error != nullptr && (first == nullptr || worker.failed_item < first_item)) {
      first = std::move(error);
      first_item = worker.failed_item;
    }
  }
  std::rethrow_exception(std::move(first));
}

void ThreadPool::Impl::RunRegion(int64_t n, int parts, ItemFunction fn, Stealing stealing) {
  fn_ = &fn;
  ++region_;
  for (int id = 0; id < parts; ++id) {
    workers_[static_cast<size_t>(id)].items.Set(PartOf(n, parts, id), stealing);
  }
  Publish(static_cast<uint64_t>(parts));
  RunItems(0, parts);
  WaitForOthers(n);
  RethrowFirstError();
}

void ThreadPool::Impl::ParallelFor(int64_t n, int64_t grain, Function fn) {
  if (n <= 0) return;
  if (current_region.pool == this) {
    // Nested: the others are busy with the outer region. The thread keeps its slot, so that scratch
    // by slot stays its own.
    fn(0, n, current_region.slot);
    return;
  }
  const std::lock_guard<std::mutex> lock(caller_mutex_);
  const int parts = n <= grain ? 1 : static_cast<int>(std::min<int64_t>(n, num_threads_));
  const auto run_part = [&](int64_t part, int) {
    const RegionScope scope(this, static_cast<int>(part));
    const Range range = PartOf(n, parts, part);
    fn(range.begin, range.end, static_cast<int>(part));
  };
  if (parts == 1) return run_part(0, 0);
  RunRegion(parts, parts, run_part);
}

void ThreadPool::Impl::ParallelForItems(int64_t n, ItemFunction fn) {
  if (n <= 1 || num_threads_ == 1 || current_region.pool == this) {
    ParallelFor(n, n, [&](int64_t begin, int64_t end, int slot) {
      for (int64_t item = begin; item < end; ++item) fn(item, slot);
    });
    return;
  }
  AS_CHECK(n <= INT32_MAX) << "a region of " << n << " items";
  const std::lock_guard<std::mutex> lock(caller_mutex_);
  const int parts = static_cast<int>(std::min<int64_t>(n, num_threads_));
  RunRegion(n, parts, [&](int64_t item, int thread) {
    const RegionScope scope(this, thread);
    fn(item, thread);
  });
}

void ThreadPool::Impl::ForEachThread(FunctionRef<void(int)> fn) {
  AS_CHECK(current_region.pool != this) << "a region of each thread within a region";
  const std::lock_guard<std::mutex> lock(caller_mutex_);
  const auto run = [&](int64_t, int thread) {
    const RegionScope scope(this, thread);
    fn(thread);
  };
  if (num_threads_ == 1) return run(0, 0);
  RunRegion(num_threads_, num_threads_, run, Stealing::kNo);
}

ThreadPool::ThreadPool(int num_threads, bool pin)
    : impl_(std::make_unique<Impl>(num_threads == 0 ? CpuCount() : num_threads, pin,
                                   AffinityCores(), std::vector<int>())) {}
ThreadPool::ThreadPool(std::vector<int> cores, std::vector<int> caller_cores)
    : impl_(std::make_unique<Impl>(static_cast<int>(cores.size()), /*pin=*/true, cores,
                                   std::move(caller_cores))) {}
ThreadPool::~ThreadPool() {
  if (!home_.IsHere()) (void)impl_.release();
}

int ThreadPool::num_threads() const { return impl_->num_threads(); }

void ThreadPool::KeepCallerOffWorkers() const { impl_->KeepCallerOffWorkers(); }

void ThreadPool::ParallelFor(int64_t n, int64_t grain,
                             FunctionRef<void(int64_t, int64_t, int)> fn) {
  impl_->ParallelFor(n, grain, fn);
}

void ThreadPool::ParallelForItems(int64_t n, FunctionRef<void(int64_t, int)> fn) {
  impl_->ParallelForItems(n, fn);
}

void ThreadPool::ForEachThread(FunctionRef<void(int)> fn) { impl_->ForEachThread(fn); }

Status NoMoreThreads(int num_threads, const std::system_error& error) {
  return Status::ResourceExhausted("num_threads is " + std::to_string(num_threads) +
                                   ", but the system gives no more threads: " + error.what());
}

}  // namespace allspark
