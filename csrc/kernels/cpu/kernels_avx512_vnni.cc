// Kernels that the integer dot product makes faster than AVX-512 alone: GEMM with int8 activations.
// The rules of kernels_avx2.cc apply here too.
#define AS_KERNELS_NATIVE_VNNI 1
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/quantized.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillAvx512Vnni(KernelTable& table) noexcept {
  FillForms<InBytes<ByteTiles>>(table, DType::kInt8);
}

}  // namespace allspark::kernels
