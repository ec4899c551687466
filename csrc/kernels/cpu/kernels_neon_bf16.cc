// What the bfloat16 dot product improves over plain Arm. The rules of kernels_avx2.cc hold here
// too.
#define AS_KERNELS_NATIVE_BF16 1
#include "kernels/cpu/vec_neon.h"

#include "kernels/cpu/fill_bf16.inl"

namespace allspark::kernels {

void FillNeonBf16(KernelTable& table) noexcept { FillBf16Products(table); }

}  // namespace allspark::kernels
