// Kernels that the matrix instructions make faster than Arm's dot products: GEMM with int8
// activations. The rules of kernels_avx2.cc apply here too.
#define AS_KERNELS_NATIVE_I8MM 1
#include "kernels/cpu/vec_neon.h"

#include "kernels/cpu/mmla.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillNeonI8mm(KernelTable& table) noexcept {
  FillForms<InBytes<MmlaTiles>>(table, DType::kInt8);
}

}  // namespace allspark::kernels
