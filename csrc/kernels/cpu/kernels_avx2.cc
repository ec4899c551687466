// All kernels for AVX2 with FMA. Compiled with flags that the program's baseline does not have:
// nothing but the args structs, intrinsics and our own inlined code may be included (README.md
// beside this file).
#include "kernels/cpu/fill.inl"
#include "kernels/cpu/vec_avx2.h"

namespace allspark::kernels {

void FillAvx2(KernelTable& table) noexcept { FillVectorKernels(table); }

}  // namespace allspark::kernels
