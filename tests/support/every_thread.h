// Runs something on every thread of a pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "platform/thread_pool.h"

namespace allspark::testing {

// Runs fn(thread) on every thread of the pool. No part ends before all have begun, so no thread
// takes the part of another.
template <typename Run>
void OnEveryThread(ThreadPool& pool, const Run& run) {
  std::atomic<int> num_begun = 0;
  pool.ParallelFor(pool.num_threads(), 0, [&](int64_t, int64_t, int part) {
    ++num_begun;
    while (num_begun < pool.num_threads()) std::this_thread::yield();
    run(part);
  });
}

}  // namespace allspark::testing
