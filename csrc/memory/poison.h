// Tells AddressSanitizer which bytes of an allocator's own memory may be touched; nothing in other
// builds.
#pragma once

#include <cstddef>

// GCC defines a macro, clang a feature.
#if defined(__SANITIZE_ADDRESS__)
#define AS_HAS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define AS_HAS_ASAN 1
#endif
#endif

#ifdef AS_HAS_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace allspark {

inline void Poison([[maybe_unused]] void* ptr, [[maybe_unused]] size_t bytes) {
#ifdef AS_HAS_ASAN
  ASAN_POISON_MEMORY_REGION(ptr, bytes);
#endif
}

inline void Unpoison([[maybe_unused]] void* ptr, [[maybe_unused]] size_t bytes) {
#ifdef AS_HAS_ASAN
  ASAN_UNPOISON_MEMORY_REGION(ptr, bytes);
#endif
}

}  // namespace allspark
