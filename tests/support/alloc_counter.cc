#include "support/alloc_counter.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>

#include "support/sanitized.h"

namespace allspark::testing {

namespace {

// Plain data with static initial values: the hook runs before any constructor.
thread_local constinit AllocationCounter* this_threads_counter = nullptr;
thread_local constinit HeapFaults* this_threads_faults = nullptr;
thread_local constinit int this_tid = 0;

std::atomic<int> watched_tid{0};
std::atomic<AllocationCounter*> watched_counter{nullptr};
[[maybe_unused]] std::atomic<int64_t> num_live{0};

// Returns false when the allocation must fail. Allocates nothing itself.
bool OnAllocation(size_t bytes) {
  if (this_threads_counter != nullptr) this_threads_counter->Add(bytes);
  const int watched = watched_tid.load(std::memory_order_acquire);
  if (watched != 0) {
    if (this_tid == 0) this_tid = static_cast<int>(syscall(SYS_gettid));
    AllocationCounter* const counter = watched_counter.load(std::memory_order_acquire);
    if (this_tid == watched && counter != nullptr) counter->Add(bytes);
  }
  return this_threads_faults == nullptr || !this_threads_faults->Refuses();
}

}  // namespace

void AllocationCounter::Start() { this_threads_counter = this; }
void AllocationCounter::Stop() { this_threads_counter = nullptr; }

void BeginCountingThread(int tid, AllocationCounter* counter) {
  watched_counter.store(counter, std::memory_order_release);
  watched_tid.store(tid, std::memory_order_release);
}
void EndCountingThread() { watched_tid.store(0, std::memory_order_release); }

void HeapFaults::FailNth(int64_t n, bool sticky) {
  sticky_ = sticky;
  num_refused_ = 0;
  num_calls_ = 0;
  fail_at_ = n;
}
void HeapFaults::Enter() { this_threads_faults = this; }
void HeapFaults::Leave() { this_threads_faults = nullptr; }
HeapFaults::Scope::Scope(HeapFaults* faults) : outer_(this_threads_faults) {
  this_threads_faults = faults;
}
HeapFaults::Scope::~Scope() { this_threads_faults = outer_; }
bool HeapFaults::Refuses() {
  const int64_t call = num_calls_.fetch_add(1) + 1;
  const int64_t fail_at = fail_at_;
  if (fail_at == 0 || (sticky_ ? call < fail_at : call != fail_at)) return false;
  num_refused_.fetch_add(1);
  return true;
}

bool SeesAlignedAllocations() { return !AS_SANITIZED_THREADS; }

}  // namespace allspark::testing

#if AS_SANITIZED  // The sanitizer owns malloc.

// Both sanitizers' runtimes have it; GCC installs no header that declares it.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*,
                                                                             size_t),
                                                         void (*free_hook)(const volatile void*));

namespace allspark::testing {
namespace {
void MallocHook(const volatile void*, size_t bytes) { (void)OnAllocation(bytes); }
void FreeHook(const volatile void*) {}
[[maybe_unused]] const int hooks_installed =
    __sanitizer_install_malloc_and_free_hooks(MallocHook, FreeHook);
}  // namespace
bool CanInjectFailures() { return false; }
int64_t NumLiveAllocations() { return 0; }
}  // namespace allspark::testing

#else

namespace allspark::testing {
namespace {
void* Counted(void* ptr) {
  if (ptr != nullptr) num_live.fetch_add(1, std::memory_order_relaxed);
  return ptr;
}
}  // namespace
bool CanInjectFailures() { return true; }
int64_t NumLiveAllocations() { return num_live.load(std::memory_order_relaxed); }
}  // namespace allspark::testing

// These stand for the system's functions also in other libraries, so they must be visible where
// everything else is hidden; GCC sees to that by itself, clang does not.
#pragma GCC visibility push(default)
// glibc exports its own functions under these names for exactly this use.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

#define AS_COUNT_OR_FAIL(bytes)                    \
  if (!::allspark::testing::OnAllocation(bytes)) { \
    errno = ENOMEM;                                \
    return nullptr;                                \
  }

void* malloc(size_t bytes) {
  AS_COUNT_OR_FAIL(bytes);
  return allspark::testing::Counted(__libc_malloc(bytes));
}
void* calloc(size_t count, size_t bytes) {
  AS_COUNT_OR_FAIL(count * bytes);
  return allspark::testing::Counted(__libc_calloc(count, bytes));
}
void* realloc(void* ptr, size_t bytes) {
  AS_COUNT_OR_FAIL(bytes);
  void* const result = __libc_realloc(ptr, bytes);
  if (ptr == nullptr) return allspark::testing::Counted(result);
  // realloc to 0 bytes frees the block.
  if (bytes == 0) allspark::testing::num_live.fetch_sub(1, std::memory_order_relaxed);
  return result;
}
void* memalign(size_t alignment, size_t bytes) {
  AS_COUNT_OR_FAIL(bytes);
  return allspark::testing::Counted(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  AS_COUNT_OR_FAIL(bytes);
  return allspark::testing::Counted(__libc_memalign(alignment, bytes));
}
int posix_memalign(void** result, size_t alignment, size_t bytes) {
  if (!::allspark::testing::OnAllocation(bytes)) return ENOMEM;
  void* const ptr = allspark::testing::Counted(__libc_memalign(alignment, bytes));
  if (ptr == nullptr) return ENOMEM;
  *result = ptr;
  return 0;
}
void free(void* ptr) {
  if (ptr != nullptr) allspark::testing::num_live.fetch_sub(1, std::memory_order_relaxed);
  __libc_free(ptr);
}
}  // extern "C"
#pragma GCC visibility pop

#endif
