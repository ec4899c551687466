// The AVX-VNNI, AVX-512 and AMX kernels on processors without them: the same sources, with
// intrinsics emulated by SIMDe (Debian: libsimde-dev). Only for tests: every line of the kernels'
// logic runs on every x86-64 processor with AVX2.
#pragma once

#include "kernels/kernel_slots.h"
#include "support/sanitized.h"

// With sanitizers the emulation takes minutes to compile; sanitizer builds omit it unless
// AS_EMULATE_WITH_SANITIZERS is defined.
#if defined(__x86_64__) && __has_include(<simde/x86/avx512.h>) && \
    (!AS_SANITIZED || defined(AS_EMULATE_WITH_SANITIZERS))
#define AS_EMULATES_TABLES 1
#else
#define AS_EMULATES_TABLES 0
#endif

namespace allspark::testing {

// False without SIMDe at build time and in sanitizer builds (the fill functions then do nothing),
// and on processors without the table avx2.
bool CanEmulateTables();
// As FillAvx2Vnni, over the table avx2. The others are as FillAvx512, FillAvx512Vnni,
// FillAvx512Bf16 and FillAmx, each over a table filled by those before it.
void FillEmulatedAvx2Vnni(kernels::KernelTable& table);
void FillEmulatedAvx512(kernels::KernelTable& table);
void FillEmulatedAvx512Vnni(kernels::KernelTable& table);
void FillEmulatedAvx512Bf16(kernels::KernelTable& table);
void FillEmulatedAmx(kernels::KernelTable& table);

}  // namespace allspark::testing
