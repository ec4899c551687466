// Kernels that the integer dot product makes faster than AVX-512 alone: GEMM with int8 activations
// and attention over quantised caches. All bits are those of AVX-512. The rules of kernels_avx2.cc
// apply here too.
#define AS_KERNELS_NATIVE_VNNI 1
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/attention.inl"
#include "kernels/cpu/quantized.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillAvx512Vnni(KernelTable& table) noexcept {
  FillForms<InBytes<ByteTiles>>(table, DType::kInt8);
  FillQuantizedAttention(table);
}

}  // namespace allspark::kernels
