// All kernels for AVX2 with FMA. Compiled with flags beyond the program's baseline: only the args
// structs, intrinsics and our own inlined code may be included (README.md beside this file).
// Included first: the kernels are written in terms of these vectors.
#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/fill.inl"

namespace allspark::kernels {

void FillAvx2(KernelTable& table) noexcept { FillVectorKernels(table); }

}  // namespace allspark::kernels
