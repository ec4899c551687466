// FlushedFloats: while it lives, float arithmetic of this thread makes zeros of subnormal numbers,
// as torch.set_flush_denormal(True) does.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace allspark::testing {

class FlushedFloats {
 public:
#if defined(__x86_64__)
  FlushedFloats() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushedFloats() { _mm_setcsr(before_); }

 private:
  const unsigned int before_;
#elif defined(__aarch64__)
  FlushedFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | uint64_t{1} << 24));
  }
  ~FlushedFloats() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_ = 0;
#endif
};

}  // namespace allspark::testing
