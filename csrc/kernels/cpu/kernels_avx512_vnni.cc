// What the integer dot product improves over AVX-512: GEMM with int8 activations. The rules of
// kernels_avx2.cc hold here too.
#define AS_KERNELS_NATIVE_VNNI 1
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/quantized.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillAvx512Vnni(KernelTable& table) noexcept {
  const int int8 = static_cast<int>(DType::kInt8);
  table.gemm[static_cast<int>(DType::kUInt8)][int8] = GemmBytes<8>;
  table.gemm[static_cast<int>(DType::kUInt4)][int8] = GemmBytes<4>;
}

}  // namespace allspark::kernels
