// An Allocator that forwards to another one and refuses chosen allocations, to test that every
// caller survives a refusal. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>

#include "memory/allocator.h"

namespace allspark::testing {

class FaultAllocator : public Allocator {
 public:
  explicit FaultAllocator(Allocator* inner) : inner_(inner) {}

  // Refuses the n-th allocation from now (1: the next); 0: none. `sticky` refuses all after it as
  // well.
  void FailNth(int64_t n, bool sticky = false) {
    sticky_ = sticky;
    num_refused_ = 0;
    num_calls_ = 0;
    fail_at_ = n;
  }
  // Calls since the last FailNth.
  int64_t num_calls() const { return num_calls_; }
  int64_t num_refused() const { return num_refused_; }

  void* Allocate(size_t bytes) override {
    const int64_t call = ++num_calls_;
    const int64_t fail_at = fail_at_;
    if (fail_at > 0 && (call == fail_at || (sticky_ && call > fail_at))) {
      ++num_refused_;
      return nullptr;
    }
    return inner_->Allocate(bytes);
  }
  void Free(void* ptr) override { inner_->Free(ptr); }
  AllocatorStats Stats() const override { return inner_->Stats(); }

 private:
  Allocator* const inner_;
  std::atomic<int64_t> fail_at_{0};
  std::atomic<bool> sticky_{false};
  std::atomic<int64_t> num_calls_{0};
  std::atomic<int64_t> num_refused_{0};
};

}  // namespace allspark::testing
