// Kernels that the matrix instructions make faster than Arm's dot products: GEMM with int8 and with
// bfloat16 activations. The rules of kernels_avx2.cc apply here too.
#define AS_KERNELS_NATIVE_I8MM 1
#define AS_KERNELS_NATIVE_BF16 1
#include "kernels/cpu/vec_neon.h"

#include "kernels/cpu/fill_bf16.inl"
#include "kernels/cpu/mmla.inl"

namespace allspark::kernels {

void FillNeonI8mm(KernelTable& table) noexcept {
  FillForms<InBytes<MmlaByteTiles>>(table, DType::kInt8);
  FillBf16Gemm<DotMmla>(table);
}

}  // namespace allspark::kernels
