// Kernels that the integer dot product makes faster than the Arm baseline: GEMM with int8
// activations. The rules of kernels_avx2.cc apply here too.
#define AS_KERNELS_NATIVE_SDOT 1
#include "kernels/cpu/vec_neon.h"

#include "kernels/cpu/quantized.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillNeonDotprod(KernelTable& table) noexcept {
  FillForms<InBytes<ByteTiles>>(table, DType::kInt8);
}

}  // namespace allspark::kernels
