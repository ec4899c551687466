// All kernels for 64-bit Arm as every such processor has it. The rules of kernels_avx2.cc hold here
// too.
#include "kernels/cpu/vec_neon.h"

#include "kernels/cpu/fill.inl"

namespace allspark::kernels {

void FillNeon(KernelTable& table) noexcept { FillVectorKernels(table); }

}  // namespace allspark::kernels
