// Kernels that the integer dot product makes faster than the Arm baseline: GEMM with int8
// activations. The rules of kernels_avx2.cc apply here too.
#define AS_KERNELS_NATIVE_SDOT 1
#include "kernels/cpu/vec_neon.h"

#include "kernels/cpu/quantized.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillNeonDotprod(KernelTable& table) noexcept {
  FillGemm<GemmBytes<8>>(table, DType::kUInt8, DType::kInt8);
  FillGemm<GemmBytes<4>>(table, DType::kUInt4, DType::kInt8);
}

}  // namespace allspark::kernels
