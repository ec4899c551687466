// The counter that other tests rely on must see what it claims to see.
#include "support/alloc_counter.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>

namespace allspark::testing {
namespace {

// Keeps the compiler from removing an allocation that nothing reads.
void Keep(void* ptr) { asm volatile("" : : "g"(ptr) : "memory"); }

TEST(AllocationCounterTest, CountsEveryWayToAllocate) {
  AllocationCounter counter;
  counter.Start();
  void* const a = std::malloc(10);
  Keep(a);
  const int64_t after_malloc = counter.count();
  void* b = std::calloc(2, 10);
  Keep(b);
  b = std::realloc(b, 100000);
  Keep(b);
  const int64_t after_realloc = counter.count();
  void* const c = std::aligned_alloc(64, 128);
  Keep(c);
  void* d = nullptr;
  ASSERT_EQ(posix_memalign(&d, 64, 128), 0);
  const int64_t after_aligned = counter.count();
  int* const e = new int(1);
  Keep(e);
  const int64_t after_new = counter.count();
  counter.Stop();
  EXPECT_EQ(after_malloc, 1);
  EXPECT_GE(after_realloc, 3);
  EXPECT_EQ(after_aligned - after_realloc, SeesAlignedAllocations() ? 2 : 0);
  EXPECT_EQ(after_new - after_aligned, 1);
  EXPECT_GE(counter.bytes(), 10 + 20 + 100000);
  const int64_t stopped = counter.count();
  std::free(a);
  std::free(b);
  std::free(c);
  std::free(d);
  delete e;
  Keep(std::make_unique<int>(2).get());
  EXPECT_EQ(counter.count(), stopped) << "stopped, but still counting";
  counter.Reset();
  EXPECT_EQ(counter.count(), 0);
}

TEST(AllocationCounterTest, OtherThreadsAreNotCounted) {
  AllocationCounter counter;
  std::atomic<int> stage{0};
  std::thread other([&] {
    while (stage != 1) std::this_thread::yield();
    for (int i = 0; i < 100; ++i) Keep(std::make_unique<int>(i).get());
    stage = 2;
  });
  {
    const AllocationCounter::Scope scope(&counter);
    stage = 1;
    while (stage != 2) std::this_thread::yield();
  }
  other.join();
  EXPECT_EQ(counter.count(), 0);
}

TEST(AllocationCounterTest, AThreadCanBeWatchedFromOutside) {
  AllocationCounter counter;
  std::atomic<int> tid{0}, stage{0};
  std::thread other([&] {
    tid = static_cast<int>(syscall(SYS_gettid));
    while (stage != 1) std::this_thread::yield();
    for (int i = 0; i < 100; ++i) Keep(std::make_unique<int>(i).get());
    stage = 2;
    while (stage != 3) std::this_thread::yield();
    for (int i = 0; i < 100; ++i) Keep(std::make_unique<int>(i).get());
    stage = 4;
  });
  while (tid == 0) std::this_thread::yield();
  BeginCountingThread(tid, &counter);
  Keep(std::make_unique<int>(1).get());
  EXPECT_EQ(counter.count(), 0);
  stage = 1;
  while (stage != 2) std::this_thread::yield();
  EndCountingThread();
  stage = 3;
  other.join();
  EXPECT_EQ(counter.count(), 100);
}

TEST(HeapFaultsTest, RefusesTheOneThatItIsTold) {
  if (!CanInjectFailures()) GTEST_SKIP() << "a sanitizer owns malloc";
  HeapFaults faults;
  void* given[3] = {};
  for (const bool sticky : {false, true}) {
    faults.FailNth(2, sticky);
    {
      const HeapFaults::Scope scope(&faults);
      for (void*& ptr : given) Keep(ptr = std::malloc(1));
    }
    EXPECT_NE(given[0], nullptr);
    EXPECT_EQ(given[1], nullptr);
    EXPECT_EQ(given[2] == nullptr, sticky);
    EXPECT_EQ(faults.num_calls(), 3);
    EXPECT_EQ(faults.num_refused(), sticky ? 2 : 1);
    for (void* ptr : given) std::free(ptr);
  }
  bool threw = false;
  faults.FailNth(1);
  try {
    const HeapFaults::Scope scope(&faults);
    Keep(std::make_unique<int>(1).get());
  } catch (const std::bad_alloc&) {
    threw = true;
  }
  EXPECT_TRUE(threw);
  EXPECT_NE(std::make_unique<int>(1), nullptr) << "outside of the scope";
}

TEST(HeapFaultsTest, KnowsWhatIsLive) {
  if (!CanInjectFailures()) GTEST_SKIP() << "a sanitizer owns malloc";
  const int64_t before = NumLiveAllocations();
  void* ptr = std::malloc(1);
  Keep(ptr);
  void* const other = std::aligned_alloc(64, 64);
  Keep(other);
  ptr = std::realloc(ptr, 1000);
  Keep(ptr);
  const int64_t then = NumLiveAllocations();
  std::free(ptr);
  std::free(other);
  std::free(nullptr);
  const int64_t after = NumLiveAllocations();
  EXPECT_EQ(then - before, 2);
  EXPECT_EQ(after, before);
}

}  // namespace
}  // namespace allspark::testing
