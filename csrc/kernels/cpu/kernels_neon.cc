// All kernels for the instructions that every 64-bit Arm processor has. The rules of
// kernels_avx2.cc apply here too.
#include "kernels/cpu/vec_neon.h"

#include "kernels/cpu/fill.inl"

namespace allspark::kernels {

void FillNeon(KernelTable& table) noexcept { FillVectorKernels(table); }

}  // namespace allspark::kernels
