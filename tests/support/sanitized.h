// AS_SANITIZED: whether this is an ASan or TSan build, for tests that must be smaller there, or
// whose figures the sanitizer's own memory distorts. AS_SANITIZED_THREADS: a TSan build. GCC and
// Clang define different macros for them.
#pragma once

#if defined(__has_feature)
#define AS_HAS_FEATURE(name) __has_feature(name)
#else
#define AS_HAS_FEATURE(name) 0
#endif

#if defined(__SANITIZE_THREAD__) || AS_HAS_FEATURE(thread_sanitizer)
#define AS_SANITIZED_THREADS 1
#else
#define AS_SANITIZED_THREADS 0
#endif
#if AS_SANITIZED_THREADS || defined(__SANITIZE_ADDRESS__) || AS_HAS_FEATURE(address_sanitizer)
#define AS_SANITIZED 1
#else
#define AS_SANITIZED 0
#endif
