// The AVX-512 and AMX kernels on processors without either: the same sources, their intrinsics
// emulated by SIMDe (Debian: libsimde-dev). For tests alone, so that every line of their logic runs
// everywhere.
#pragma once

#include "kernels/kernel_slots.h"

namespace allspark::testing {

// False where SIMDe was not there at build time, in sanitizer builds (the fill functions then do
// nothing), or where the processor lacks AVX2 and FMA.
bool HaveEmulatedAvx512();
// On top of a filled reference table, as FillAvx512; then, on top of that, as FillAvx512Bf16 and
// FillAmx.
void FillEmulatedAvx512(kernels::KernelTable& table);
void FillEmulatedAvx512Bf16(kernels::KernelTable& table);
void FillEmulatedAmx(kernels::KernelTable& table);

}  // namespace allspark::testing
