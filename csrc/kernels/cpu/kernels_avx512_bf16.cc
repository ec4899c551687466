// What the bfloat16 dot product improves over AVX-512. The rules of kernels_avx2.cc hold here too.
#define AS_KERNELS_NATIVE_VNNI 1
#define AS_KERNELS_NATIVE_BF16 1
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/fill_bf16.inl"

namespace allspark::kernels {

void FillAvx512Bf16(KernelTable& table) noexcept { FillBf16Products(table); }

}  // namespace allspark::kernels
