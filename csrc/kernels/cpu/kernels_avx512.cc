// All kernels for AVX-512 (F, BW, VL, DQ). The rules of kernels_avx2.cc apply here too.
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/fill.inl"

namespace allspark::kernels {

void FillAvx512(KernelTable& table) noexcept { FillVectorKernels(table); }

}  // namespace allspark::kernels
