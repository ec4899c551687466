#include "support/emulated_tables.h"

#if AS_EMULATES_TABLES

#include "support/emulated_intrinsics.h"

// Without the integer dot product, which emulated_avx512_dots.cc has.
#define FillAvx512 FillAvx512OnSimde
#include "kernels/cpu/kernels_avx512.cc"

namespace allspark::testing {

void FillEmulatedAvx512(kernels::KernelTable& table) { kernels::FillAvx512OnSimde(table); }

}  // namespace allspark::testing

AS_END_OF_EMULATION

#else

namespace allspark::testing {

void FillEmulatedAvx512(kernels::KernelTable&) {}

}  // namespace allspark::testing

#endif
