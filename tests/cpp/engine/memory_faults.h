// Lives (fault_life.h) in which the n-th allocation fails, for many n.
#pragma once

#include <string>

#include "cpp/engine/fault_life.h"
#include "support/environment.h"
#include "support/process_usage.h"

namespace allspark::testing {

class MemoryFaultTest : public ::testing::Test {
 protected:
  // A warm-up makes no further allocations and takes most of a start's time.
  const ScopedVariable no_warmup_{"ALLSPARK_DISABLE_WARMUP", "1"};

  // Fails every allocation of device memory: a single one, and all from one on until a call has
  // failed.
  void FailDevice() {
    const FaultLife::Outcome expected = LiveWithout();
    for (const bool sticky : {false, true}) {
      int64_t n = 1;
      for (;; ++n) {
        SCOPED_TRACE("device allocation " + std::to_string(n) + (sticky ? " and all after" : ""));
        const auto region = CreateCpuBfcAllocator({}, kRegionBytes);
        ASSERT_OK(region.status());
        FaultAllocator faults(region->get());
        faults.FailNth(n, sticky);
        FaultLife life(models_, &faults, nullptr);
        life.on_failure = [&] { faults.FailNth(0); };
        life.Live();
        ExpectEnd(life, **region, expected);
        if (life.num_failures() == 0) break;
        EXPECT_EQ(life.num_failures(), 1);
        if (HasFailure()) return;
      }
      EXPECT_GT(n, 10);
    }
  }

  // Fails the first `num_first` allocations of the caller's thread, then every `stride`-th.
  void FailCallersHeap(int64_t num_first, int64_t stride) {
    FailHeap(num_first, stride, /*on_step_thread=*/false);
  }
  // The same for the step thread: its steps allocate nothing, but the calls that it serves do.
  void FailStepThreadsHeap(int64_t num_first, int64_t stride) {
    FailHeap(num_first, stride, /*on_step_thread=*/true);
  }

 private:
  static constexpr int64_t kRegionBytes = int64_t{1} << 30;

  FaultLife::Outcome LiveWithout() {
    FaultLife life(models_, nullptr, nullptr);
    life.Live();
    EXPECT_EQ(life.num_failures(), 0);
    return life.outcome();
  }

  void ExpectEnd(const FaultLife& life, const Allocator& region,
                 const FaultLife::Outcome& expected) {
    EXPECT_EQ(region.Stats().num_live, 0);
    EXPECT_EQ(life.outcome(), expected) << "after a failure of " << life.failed();
  }

  // Returns 1 if a call failed, 0 if an allocation failed without failing a call, and -1 if the
  // life has fewer allocations.
  int64_t LiveOnce(int64_t n, bool sticky, bool on_step_thread,
                   const FaultLife::Outcome& expected) {
    const auto region = CreateCpuBfcAllocator({}, kRegionBytes);
    EXPECT_OK(region.status());
    HeapFaults faults;
    faults.FailNth(n, sticky);
    FaultLife life(models_, region->get(), on_step_thread ? nullptr : &faults);
    if (on_step_thread) life.step_heap = &faults;
    life.on_failure = [&] { faults.FailNth(0); };
    life.Live();
    ExpectEnd(life, **region, expected);
    return life.num_failures() > 0 ? 1 : faults.num_refused() > 0 ? 0 : -1;
  }

  void FailHeap(int64_t num_first, int64_t stride, bool on_step_thread) {
    if (!CanInjectFailures()) GTEST_SKIP() << "a sanitizer owns malloc";
    const FaultLife::Outcome expected = LiveWithout();
    for (const bool sticky : {false, true}) {
      int64_t n = 1, num_lives = 0;
      while (true) {
        SCOPED_TRACE("heap allocation " + std::to_string(n) + (sticky ? " and all after" : ""));
        int64_t failed = 0, live = 0, descriptors = 0;
        // Memory allocated once per process may stay; memory that is left again by a second and a
        // third life is a leak.
        for (int i = 0; i < 3; ++i) {
          const int64_t live_before = NumLiveAllocations(), descriptors_before = NumDescriptors();
          failed = LiveOnce(n, sticky, on_step_thread, expected);
          live = NumLiveAllocations() - live_before;
          descriptors = NumDescriptors() - descriptors_before;
          if (live <= 0 && descriptors <= 0) break;
        }
        EXPECT_LE(live, 0) << "allocations that nobody freed";
        EXPECT_LE(descriptors, 0) << "descriptors that nobody closed";
        if (failed < 0 || HasFailure()) break;
        ++num_lives;
        n += n < num_first ? 1 : stride;
      }
      EXPECT_GT(num_lives, 10);
    }
  }

  const FaultModels models_{};
};

}  // namespace allspark::testing
