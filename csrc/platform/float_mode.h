// DefaultFloatMode: float arithmetic of this thread as the processor begins with it, while the
// object lives: rounding to nearest, and subnormal numbers stay. Programs and libraries (torch's
// set_flush_denormal, -ffast-math) change it for a thread, and threads that it makes inherit that;
// without this class bits would depend on which thread computes a row.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace allspark {

class DefaultFloatMode {
 public:
  DefaultFloatMode() : before_(Get()) {
    if (before_ != kDefault) Set(kDefault);
  }
  ~DefaultFloatMode() {
    if (before_ != kDefault) Set(before_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

  static bool IsHere() { return Get() == kDefault; }

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kDefault = 0x1f80;
  static constexpr uint64_t kFlags = 0x3f;  // of exceptions so far, which are no part of the mode
  static uint64_t Get() { return _mm_getcsr() & ~kFlags; }
  static void Set(uint64_t mode) {
    _mm_setcsr(static_cast<unsigned int>(mode | (_mm_getcsr() & kFlags)));
  }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;
  static uint64_t Get() {
    uint64_t mode = 0;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static constexpr uint64_t kDefault = 0;
  static uint64_t Get() { return kDefault; }
  static void Set(uint64_t) {}
#endif

  const uint64_t before_;
};

}  // namespace allspark
