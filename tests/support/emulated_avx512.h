// The AVX-512 and AMX kernels on processors without either: the same sources, their intrinsics
// emulated by SIMDe (Debian: libsimde-dev). For tests alone, so that every line of their logic runs
// everywhere.
#pragma once

#include "kernels/kernel_slots.h"
#include "support/sanitized.h"

// Sanitizers make the emulation take minutes to compile; their builds go without unless
// AS_EMULATE_WITH_SANITIZERS asks for it.
#if defined(__x86_64__) && __has_include(<simde/x86/avx512.h>) && \
    (!AS_SANITIZED || defined(AS_EMULATE_WITH_SANITIZERS))
#define AS_EMULATES_AVX512 1
#else
#define AS_EMULATES_AVX512 0
#endif

namespace allspark::testing {

// False where SIMDe was not there at build time, in sanitizer builds (the fill functions then do
// nothing), or where the processor lacks AVX2 and FMA.
bool HaveEmulatedAvx512();
// On top of a filled reference table, as FillAvx512; then, each on top of those before, as
// FillAvx512Vnni, FillAvx512Bf16 and FillAmx.
void FillEmulatedAvx512(kernels::KernelTable& table);
void FillEmulatedAvx512Vnni(kernels::KernelTable& table);
void FillEmulatedAvx512Bf16(kernels::KernelTable& table);
void FillEmulatedAmx(kernels::KernelTable& table);

}  // namespace allspark::testing
