#include "support/sanitized.h"

// Sanitizers make this file take minutes to compile; their builds go without unless
// AS_EMULATE_WITH_SANITIZERS asks for it.
#if defined(__x86_64__) && __has_include(<simde/x86/avx512.h>) && \
    (!AS_SANITIZED || defined(AS_EMULATE_WITH_SANITIZERS))

// Before the pragmas and the aliases, which must not reach into it.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// Compiled for AVX2 whatever the build's flags, and SIMDe told so: quick enough for tests, and with
// a true fused multiply-add. Callers check that the processor has both.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#pragma GCC diagnostic ignored "-Wpsabi"
#define SIMDE_X86_AVX2_NATIVE 1
#define SIMDE_X86_FMA_NATIVE 1
#define SIMDE_ENABLE_NATIVE_ALIASES 1
#include <simde/x86/avx512.h>

#include "base/dtype.h"
#include "support/emulated_amx.h"
#include "support/simde_avx512_gaps.h"

// The integer dot product for all of them: without it, AVX-512 does what AVX2 does.
#define AS_KERNELS_NATIVE_VNNI 1
#define AS_KERNELS_NATIVE_BF16 1
#define FillAvx512 FillAvx512OnSimde
#define FillAvx512Bf16 FillAvx512Bf16OnSimde
#define FillAmx FillAmxOnSimde
#include "kernels/cpu/kernels_avx512.cc"
#include "kernels/cpu/kernels_avx512_bf16.cc"
#undef AS_KERNELS_NATIVE_VNNI
#undef AS_KERNELS_NATIVE_BF16
#include "kernels/cpu/kernels_amx.cc"

#include "support/emulated_avx512.h"

namespace allspark::testing {

bool HaveEmulatedAvx512() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
void FillEmulatedAvx512(kernels::KernelTable& table) { kernels::FillAvx512OnSimde(table); }
void FillEmulatedAvx512Bf16(kernels::KernelTable& table) { kernels::FillAvx512Bf16OnSimde(table); }
void FillEmulatedAmx(kernels::KernelTable& table) { kernels::FillAmxOnSimde(table); }

}  // namespace allspark::testing

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

#include "support/emulated_avx512.h"

namespace allspark::testing {

bool HaveEmulatedAvx512() { return false; }
void FillEmulatedAvx512(kernels::KernelTable&) {}
void FillEmulatedAvx512Bf16(kernels::KernelTable&) {}
void FillEmulatedAmx(kernels::KernelTable&) {}

}  // namespace allspark::testing

#endif
