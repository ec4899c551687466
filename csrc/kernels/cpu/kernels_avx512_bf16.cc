// What the bfloat16 dot product improves over AVX-512: bfloat16 GEMM. Attention stays with float32
// weights and queries, which are more accurate. The rules of kernels_avx2.cc hold here too.
#define AS_KERNELS_NATIVE_BF16 1
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/gemm.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillAvx512Bf16(KernelTable& table) noexcept {
  const int bf16 = static_cast<int>(DType::kBFloat16);
  table.gemm[bf16][bf16] = Gemm<uint16_t, DotNative>;
}

}  // namespace allspark::kernels
