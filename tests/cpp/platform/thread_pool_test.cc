#include "platform/thread_pool.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/check.h"
#include "platform/affinity.h"
#include "platform/system_limits.h"
#include "support/alloc_counter.h"

namespace allspark {
namespace {

struct Part {
  int64_t begin, end;
  int index;
  bool operator==(const Part&) const = default;
};

std::vector<Part> PartsOf(ThreadPool& pool, int64_t n, int64_t grain = 0) {
  std::mutex mutex;
  std::vector<Part> parts;
  pool.ParallelFor(n, grain, [&](int64_t begin, int64_t end, int index) {
    const std::lock_guard<std::mutex> lock(mutex);
    parts.push_back({begin, end, index});
  });
  std::sort(parts.begin(), parts.end(),
            [](const Part& a, const Part& b) { return a.index < b.index; });
  return parts;
}

class ThreadPoolTest : public ::testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, CoversTheRangeOnceInContiguousBalancedParts) {
  ThreadPool pool(GetParam());
  ASSERT_EQ(pool.num_threads(), GetParam());
  for (const int64_t n : {1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 1000, 1000003}) {
    const std::vector<Part> parts = PartsOf(pool, n);
    ASSERT_EQ(parts.size(), static_cast<size_t>(std::min<int64_t>(n, GetParam()))) << n;
    int64_t next = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(parts[i].index, static_cast<int>(i));
      EXPECT_EQ(parts[i].begin, next);
      EXPECT_GT(parts[i].end, parts[i].begin);
      EXPECT_LE(parts[i].end - parts[i].begin, (n + GetParam() - 1) / GetParam());
      next = parts[i].end;
    }
    EXPECT_EQ(next, n);
    EXPECT_EQ(PartsOf(pool, n), parts) << "the partition changed";
  }
}

TEST_P(ThreadPoolTest, NothingToDoRunsNothing) {
  ThreadPool pool(GetParam());
  EXPECT_TRUE(PartsOf(pool, 0).empty());
  EXPECT_TRUE(PartsOf(pool, -3).empty());
}

TEST_P(ThreadPoolTest, NoMoreThanTheGrainRunsOnTheCallerAlone) {
  ThreadPool pool(GetParam());
  const std::thread::id caller = std::this_thread::get_id();
  std::thread::id ran_on;
  pool.ParallelFor(100, 100, [&](int64_t begin, int64_t end, int part) {
    ran_on = std::this_thread::get_id();
    EXPECT_EQ(begin, 0);
    EXPECT_EQ(end, 100);
    EXPECT_EQ(part, 0);
  });
  EXPECT_EQ(ran_on, caller);
  EXPECT_EQ(PartsOf(pool, 101, 100).size(), static_cast<size_t>(std::min(GetParam(), 101)));
}

TEST_P(ThreadPoolTest, TheCallerIsThreadZeroAndEachBeginsWithItsOwnPart) {
  ThreadPool pool(GetParam());
  std::vector<std::thread::id> first(static_cast<size_t>(GetParam()));
  const auto note = [&](std::vector<std::thread::id>* ids) {
    std::atomic<int> num_begun = 0;
    pool.ParallelFor(pool.num_threads(), 0, [&](int64_t, int64_t, int part) {
      ++num_begun;
      // No part ends before all have begun, so no thread takes the part of another.
      while (num_begun < pool.num_threads()) std::this_thread::yield();
      (*ids)[static_cast<size_t>(part)] = std::this_thread::get_id();
    });
  };
  note(&first);
  EXPECT_EQ(first[0], std::this_thread::get_id());
  EXPECT_EQ(std::set<std::thread::id>(first.begin(), first.end()).size(), first.size());
  std::vector<std::thread::id> second(first.size());
  note(&second);
  EXPECT_EQ(first, second);
  // So it is where each thread runs something for itself.
  std::vector<std::thread::id> third(first.size());
  pool.ForEachThread(
      [&](int thread) { third[static_cast<size_t>(thread)] = std::this_thread::get_id(); });
  EXPECT_EQ(first, third);
}

TEST_P(ThreadPoolTest, NoThreadRunsWhatIsAnothersAlone) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 500; ++round) {
    std::vector<std::thread::id> ran_on(static_cast<size_t>(GetParam()));
    // Late workers of a region whose items anyone may take come into the next one.
    pool.ParallelForItems(3 * GetParam(), [](int64_t, int) {});
    pool.ForEachThread([&](int thread) {
      if (thread == round % GetParam()) std::this_thread::yield();
      ran_on[static_cast<size_t>(thread)] = std::this_thread::get_id();
    });
    ASSERT_EQ(ran_on[0], std::this_thread::get_id());
    ASSERT_EQ(std::set<std::thread::id>(ran_on.begin(), ran_on.end()).size(), ran_on.size());
  }
  EXPECT_THROW(pool.ForEachThread([](int) { throw std::runtime_error("of a thread"); }),
               std::runtime_error);
  EXPECT_THROW(pool.ForEachThread([&](int) { pool.ForEachThread([](int) {}); }), InternalError);
  EXPECT_EQ(PartsOf(pool, 100).size(), static_cast<size_t>(std::min(GetParam(), 100)));
}

// Writes of one region are seen by every thread of the next, without other synchronisation.
TEST_P(ThreadPoolTest, RegionsAreOrdered) {
  ThreadPool pool(GetParam());
  std::vector<int64_t> data(997), next(997);
  std::iota(data.begin(), data.end(), 0);
  for (int round = 1; round <= 2000; ++round) {
    const int64_t n = static_cast<int64_t>(data.size());
    pool.ParallelFor(n, 0, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        // At the part's edge, another thread wrote the adjacent value.
        next[static_cast<size_t>(i)] = data[static_cast<size_t>((i + 1) % n)];
      }
    });
    data.swap(next);
    // Regions of changing width: some workers take part, some do not.
    pool.ParallelFor(round % (GetParam() + 2), 0, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) data[static_cast<size_t>(i)] += 0;
    });
  }
  for (size_t i = 0; i < data.size(); ++i) {
    ASSERT_EQ(data[i], static_cast<int64_t>((i + 2000) % data.size()));
  }
}

TEST_P(ThreadPoolTest, RunsAfterSleeping) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 20; ++round) {
    EXPECT_EQ(PartsOf(pool, 100).size(), static_cast<size_t>(std::min(GetParam(), 100)));
    std::this_thread::sleep_for(std::chrono::microseconds(round * 200));
  }
}

TEST_P(ThreadPoolTest, TheFirstPartsExceptionIsRethrownAfterAllHaveEnded) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> ended{0};
    std::string message;
    try {
      pool.ParallelFor(GetParam(), 0, [&](int64_t, int64_t, int part) {
        if (part == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
        ++ended;
        throw std::runtime_error("part " + std::to_string(part));
      });
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    EXPECT_EQ(message, "part 0") << "the first part's, whichever came first";
    EXPECT_EQ(ended, GetParam());
    EXPECT_EQ(PartsOf(pool, 100).size(), static_cast<size_t>(std::min(GetParam(), 100)))
        << "the pool works on";
  }
}

TEST_P(ThreadPoolTest, AnExceptionOfAWorkerAloneArrives) {
  ThreadPool pool(GetParam());
  const int thrower = GetParam() - 1;
  EXPECT_THROW(pool.ParallelFor(GetParam(), 0,
                                [&](int64_t, int64_t, int part) { AS_CHECK(part != thrower); }),
               InternalError);
}

TEST_P(ThreadPoolTest, NestedRegionsRunInlineAsTheSamePart) {
  ThreadPool pool(GetParam());
  std::atomic<int64_t> sum{0};
  pool.ParallelFor(GetParam() * 3, 0, [&](int64_t begin, int64_t end, int outer_id) {
    const std::thread::id outer = std::this_thread::get_id();
    for (int64_t i = begin; i < end; ++i) {
      pool.ParallelFor(100, 0, [&](int64_t inner_begin, int64_t inner_end, int inner_id) {
        EXPECT_EQ(std::this_thread::get_id(), outer);
        EXPECT_EQ(inner_id, outer_id);
        sum += inner_end - inner_begin;
      });
    }
  });
  EXPECT_EQ(sum, GetParam() * 300);
  EXPECT_EQ(PartsOf(pool, 100).size(), static_cast<size_t>(std::min(GetParam(), 100)));
}

TEST_P(ThreadPoolTest, PoolsNestInEachOther) {
  ThreadPool outer(GetParam()), inner(2);
  std::atomic<int64_t> sum{0};
  outer.ParallelFor(GetParam(), 0, [&](int64_t, int64_t, int) {
    inner.ParallelFor(10, 0, [&](int64_t begin, int64_t end, int) { sum += end - begin; });
  });
  EXPECT_EQ(sum, GetParam() * 10);
}

TEST_P(ThreadPoolTest, CallersTakeTurns) {
  ThreadPool pool(GetParam());
  // Scratch by part is safe only if no two regions overlap.
  std::vector<std::array<int64_t, 8>> scratch(static_cast<size_t>(GetParam()));
  std::atomic<int> num_inside{0}, num_errors{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 300; ++round) {
        const int64_t n = 1 + (round * 7 + caller) % 40;
        std::atomic<int64_t> sum{0};
        pool.ParallelFor(n, round % 5, [&](int64_t begin, int64_t end, int part) {
          if (part == 0 && num_inside.fetch_add(1) != 0) ++num_errors;
          std::array<int64_t, 8>& mine = scratch[static_cast<size_t>(part)];
          mine.fill(caller);
          sum += end - begin;
          for (const int64_t value : mine) num_errors += value != caller;
          if (part == 0) num_inside.fetch_sub(1);
        });
        num_errors += sum != n;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(num_errors, 0);
}

TEST_P(ThreadPoolTest, EveryItemRunsOnce) {
  ThreadPool pool(GetParam());
  for (const int64_t n : {0, 1, 2, 3, 5, 8, 64, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(n));
    std::atomic<int> strange_ids = 0;
    pool.ParallelForItems(n, [&](int64_t item, int thread_id) {
      ++runs[static_cast<size_t>(item)];
      if (thread_id < 0 || thread_id >= GetParam()) ++strange_ids;
    });
    for (const auto& count : runs) EXPECT_EQ(count, 1) << n;
    EXPECT_EQ(strange_ids, 0);
  }
}

TEST_P(ThreadPoolTest, OthersTakeOverTheItemsOfAThreadThatIsHeldUp) {
  if (GetParam() == 1) GTEST_SKIP() << "one thread has no others";
  ThreadPool pool(GetParam());
  constexpr int64_t kItems = 100;
  std::atomic<int64_t> done = 0;
  pool.ParallelForItems(kItems, [&](int64_t item, int) {
    // The first thread's first item ends after all other items, also those of the same thread.
    while (item == 0 && done < kItems - 1) std::this_thread::yield();
    ++done;
  });
  EXPECT_EQ(done, kItems);
}

// A thread that has begun nothing is not waited for: the caller runs what it was to do.
TEST_P(ThreadPoolTest, OthersTakeOverThePartsOfAThreadThatIsHeldUp) {
  if (GetParam() == 1) GTEST_SKIP() << "one thread has no others";
  ThreadPool pool(GetParam());
  const std::thread::id caller = std::this_thread::get_id();
  for (int round = 0; round < 20; ++round) {
    // Every worker stays within its first item until the caller has run all others.
    std::atomic<int> num_held = 0, num_run = 0;
    const int num_workers = GetParam() - 1;
    pool.ParallelForItems(4 * GetParam(), [&](int64_t, int) {
      if (std::this_thread::get_id() != caller) {
        ++num_held;
        while (num_run < 4 * GetParam() - num_held) std::this_thread::yield();
      } else {
        while (num_held + num_run == 0) std::this_thread::yield();
        ++num_run;
      }
    });
    EXPECT_LE(num_held, num_workers);
    EXPECT_EQ(num_held + num_run, 4 * GetParam());
  }
}

TEST_P(ThreadPoolTest, ItemsNestInlineAndTheirExceptionsArrive) {
  ThreadPool pool(GetParam());
  std::atomic<int> runs = 0;
  pool.ParallelForItems(8, [&](int64_t, int outer_id) {
    pool.ParallelForItems(8, [&](int64_t, int inner_id) { runs += outer_id == inner_id; });
  });
  EXPECT_EQ(runs, 64);
  EXPECT_THROW(
      pool.ParallelForItems(100, [](int64_t item, int) { AS_CHECK(item != 57) << "item 57"; }),
      InternalError);
  runs = 0;
  pool.ParallelForItems(10, [&](int64_t, int) { ++runs; });
  EXPECT_EQ(runs, 10) << "after an exception";
}

TEST_P(ThreadPoolTest, ARegionAllocatesNothing) {
  ThreadPool pool(GetParam());
  std::vector<int64_t> data(1000);
  std::vector<testing::AllocationCounter> workers(static_cast<size_t>(GetParam()));
  testing::AllocationCounter caller;
  const auto region = [&] {
    pool.ParallelFor(1000, 0, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) ++data[static_cast<size_t>(i)];
    });
  };
  // Allocations of the workers between two regions count too.
  pool.ForEachThread([&](int id) { workers[static_cast<size_t>(id)].Start(); });
  caller.Start();
  for (int round = 0; round < 50; ++round) {
    region();
    if (round % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  caller.Stop();
  pool.ForEachThread([&](int id) { workers[static_cast<size_t>(id)].Stop(); });
  EXPECT_EQ(caller.count(), 0);
  for (const auto& worker : workers) EXPECT_EQ(worker.count(), 0);
  EXPECT_EQ(data[999], 50);
}

TEST_P(ThreadPoolTest, PoolsComeAndGo) {
  for (int round = 0; round < 50; ++round) {
    ThreadPool pool(GetParam(), round % 2 == 0);
    if (round % 3 != 0) PartsOf(pool, round);
  }
}

// 1: no workers. 2 and 3: about this machine's cores. 17: more threads than cores on a small
// machine.
INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, ::testing::Values(1, 2, 3, 4, 17));

double ProcessCpuSeconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

TEST(IdlePoolTest, UsesNoCpu) {
  ThreadPool pool(4);
  PartsOf(pool, 100);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // Past the spinning.
  const double before = ProcessCpuSeconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(ProcessCpuSeconds() - before, 0.01);
}

TEST(ThreadPoolSizeTest, ZeroMeansEveryCore) {
  ThreadPool pool(0);
  EXPECT_EQ(pool.num_threads(), CpuCount());
  EXPECT_GE(CpuCount(), 1);
  EXPECT_LE(CpuCount(), static_cast<int>(AffinityCores().size()));
}

TEST(ThreadPoolSizeTest, ANegativeSizeIsABrokenInvariant) {
  EXPECT_THROW(ThreadPool(-1), InternalError);
  EXPECT_THROW(ThreadPool(70000), InternalError);
}

TEST(PinningTest, WorkersAreBoundToOneCoreEachAndTheCallerIsNot) {
  const std::vector<int> cores = AffinityCores();
  if (cores.size() < 2) GTEST_SKIP() << "one core only";
  const int num_threads = static_cast<int>(std::min<size_t>(cores.size(), 4));
  ThreadPool pool(num_threads);
  std::vector<std::vector<int>> seen(static_cast<size_t>(num_threads));
  pool.ForEachThread([&](int id) { seen[static_cast<size_t>(id)] = AffinityCores(); });
  EXPECT_EQ(seen[0], cores);
  for (size_t id = 1; id < seen.size(); ++id) {
    EXPECT_EQ(seen[id], std::vector<int>{cores[id]});
  }
}

TEST(PinningTest, ACallerKeepsOffTheWorkersCores) {
  const std::vector<int> cores = AffinityCores();
  if (cores.size() < 2) GTEST_SKIP() << "one core only";
  const auto seen_by_caller = [](const ThreadPool& pool, std::vector<int> allowed) {
    std::vector<int> seen;
    std::thread([&] {
      if (!allowed.empty()) PinThread(pthread_self(), allowed);
      pool.KeepCallerOffWorkers();
      seen = AffinityCores();
    }).join();
    return seen;
  };
  const ThreadPool pool(2);  // one worker, on the second core
  std::vector<int> others = cores;
  others.erase(others.begin() + 1);
  EXPECT_EQ(seen_by_caller(pool, {}), others);
  EXPECT_EQ(seen_by_caller(pool, {cores[0]}), std::vector<int>{cores[0]});
  EXPECT_EQ(seen_by_caller(pool, {cores[1]}), std::vector<int>{cores[1]}) << "it has no other";
  EXPECT_EQ(seen_by_caller(ThreadPool(2, /*pin=*/false), {}), cores);
  EXPECT_EQ(AffinityCores(), cores);
}

TEST(PinningTest, ChosenCoresAreTheThreadsInTheirOrder) {
  const std::vector<int> cores = AffinityCores();
  if (cores.size() < 2) GTEST_SKIP() << "one core only";
  ThreadPool pool({cores[1], cores[0]}, {cores[1]});
  std::vector<int> worker, caller;
  std::thread([&] {
    pool.KeepCallerOffWorkers();
    pool.ForEachThread([&](int thread) { (thread == 0 ? caller : worker) = AffinityCores(); });
  }).join();
  EXPECT_EQ(worker, std::vector<int>{cores[0]});
  EXPECT_EQ(caller, std::vector<int>{cores[1]});
  // Also without workers, callers stay among their cores.
  const std::vector<int> second = {cores[1]};
  ThreadPool alone(second, second);
  std::thread([&] {
    alone.KeepCallerOffWorkers();
    caller = AffinityCores();
  }).join();
  EXPECT_EQ(caller, std::vector<int>{cores[1]});
}

TEST(PinningTest, TooManyThreadsOrNoPinLeaveTheMaskAlone) {
  const std::vector<int> cores = AffinityCores();
  for (const auto& [num_threads, pin] :
       {std::pair{static_cast<int>(cores.size()) + 1, true}, {2, false}}) {
    ThreadPool pool(num_threads, pin);
    std::vector<std::vector<int>> seen(static_cast<size_t>(num_threads));
    pool.ForEachThread([&](int id) { seen[static_cast<size_t>(id)] = AffinityCores(); });
    for (const std::vector<int>& mask : seen) EXPECT_EQ(mask, cores);
  }
}

TEST(FunctionRefTest, ReferencesConstAndMutableCallables) {
  int calls = 0;
  auto mutable_lambda = [calls](int by) mutable { return calls += by; };
  const FunctionRef<int(int)> ref = mutable_lambda;
  EXPECT_EQ(ref(2), 2);
  EXPECT_EQ(ref(3), 5);
  const auto const_lambda = [](int by) { return by * 2; };
  const FunctionRef<int(int)> const_ref = const_lambda;
  EXPECT_EQ(const_ref(4), 8);
  const FunctionRef<int(int)> copy = const_ref;
  EXPECT_EQ(copy(5), 10);
}

}  // namespace
}  // namespace allspark
