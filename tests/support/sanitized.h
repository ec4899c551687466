// AS_SANITIZED: whether this is an ASan or TSan build, for tests that must be smaller there, or
// whose figures the sanitizer's own memory distorts. GCC and Clang define different macros for it.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define AS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define AS_SANITIZED 1
#endif
#endif
#if !defined(AS_SANITIZED)
#define AS_SANITIZED 0
#endif
