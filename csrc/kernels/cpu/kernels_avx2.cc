// All kernels for AVX2 with FMA. Compiled with flags that the program's baseline does not have:
// nothing but the args structs, intrinsics and our own inlined code may be included (README.md
// beside this file).
// The vectors come first: the kernels are written over them.
#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/fill.inl"

namespace allspark::kernels {

void FillAvx2(KernelTable& table) noexcept { FillVectorKernels(table); }

}  // namespace allspark::kernels
