#include "support/emulated_tables.h"

#include "kernels/kernel_table.h"

namespace allspark::testing {

bool CanEmulateTables() { return AS_EMULATES_TABLES != 0 && kernels::FindTable("avx2") != nullptr; }

}  // namespace allspark::testing

#if AS_EMULATES_TABLES

#include "support/emulated_intrinsics.h"

#undef _mm256_dpbusd_epi32
#define _mm256_dpbusd_epi32 AS_WIDE::DotBytes
#define _mm256_dpwssd_avx_epi32 AS_WIDE::DotWords
#define FillAvx2Vnni FillAvx2VnniOnSimde
#include "kernels/cpu/kernels_avx2_vnni.cc"

namespace allspark::testing {

void FillEmulatedAvx2Vnni(kernels::KernelTable& table) { kernels::FillAvx2VnniOnSimde(table); }

}  // namespace allspark::testing

AS_END_OF_EMULATION

#else

namespace allspark::testing {

void FillEmulatedAvx2Vnni(kernels::KernelTable&) {}

}  // namespace allspark::testing

#endif
