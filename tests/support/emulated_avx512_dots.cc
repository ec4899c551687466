// The emulated kernels with dot products: VNNI's of bytes, BF16's of pairs, AMX's of tiles.
#include "support/emulated_tables.h"

#if AS_EMULATES_TABLES

#include "support/emulated_intrinsics.h"

#define AS_KERNELS_NATIVE_VNNI 1
#define AS_KERNELS_NATIVE_BF16 1
#define FillAvx512Vnni FillAvx512VnniOnSimde
#define FillAvx512Bf16 FillAvx512Bf16OnSimde
#define FillAmx FillAmxOnSimde
#include "kernels/cpu/kernels_amx.cc"
#include "kernels/cpu/kernels_avx512_bf16.cc"
#include "kernels/cpu/kernels_avx512_vnni.cc"

namespace allspark::testing {

void FillEmulatedAvx512Vnni(kernels::KernelTable& table) { kernels::FillAvx512VnniOnSimde(table); }
void FillEmulatedAvx512Bf16(kernels::KernelTable& table) { kernels::FillAvx512Bf16OnSimde(table); }
void FillEmulatedAmx(kernels::KernelTable& table) { kernels::FillAmxOnSimde(table); }

}  // namespace allspark::testing

AS_END_OF_EMULATION

#else

namespace allspark::testing {

void FillEmulatedAvx512Vnni(kernels::KernelTable&) {}
void FillEmulatedAvx512Bf16(kernels::KernelTable&) {}
void FillEmulatedAmx(kernels::KernelTable&) {}

}  // namespace allspark::testing

#endif
