// AVX-512's and AMX's intrinsics on a processor with AVX2: SIMDe's, and those that it lacks. For
// the files that compile the emulated kernels; each must end with AS_END_OF_EMULATION.
#pragma once

// Included before the pragmas and the aliases, which must not change it.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// Compiles for AVX2 and FMA whatever the build's flags are, and tells SIMDe so: fast enough for
// tests, and with a true fused multiply-add. Callers check that the processor has both.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#define AS_END_OF_EMULATION _Pragma("clang attribute pop")
#else
#pragma GCC target("avx2,fma,f16c")
#define AS_END_OF_EMULATION
#endif
#pragma GCC diagnostic ignored "-Wpsabi"
#define SIMDE_NO_INLINE  // what is often called, avx512_on_avx2.h has; the rest compiles faster so
#define SIMDE_X86_AVX2_NATIVE 1
#define SIMDE_X86_FMA_NATIVE 1
#define SIMDE_ENABLE_NATIVE_ALIASES 1
#include <simde/x86/avx512.h>

#include "base/dtype.h"
// The kernels are inlined where the compiler likes: everything in everything takes it minutes.
#undef AS_ALWAYS_INLINE
#define AS_ALWAYS_INLINE inline

// What this processor's own kernels do not do, so that tests run both.
#define AS_KERNELS_FEW_UNITS !__builtin_cpu_is("intel")

#include "support/avx512_on_avx2.h"
#include "support/emulated_amx.h"
