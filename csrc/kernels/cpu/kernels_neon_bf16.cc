// Kernels that the bfloat16 dot product makes faster than the Arm baseline; attention over
// quantised caches, too, which takes the faster exponential of attention_tile.inl. The rules of
// kernels_avx2.cc apply here too.
#define AS_KERNELS_NATIVE_BF16 1
#include "kernels/cpu/vec_neon.h"

#include "kernels/cpu/fill_bf16.inl"

namespace allspark::kernels {

void FillNeonBf16(KernelTable& table) noexcept {
  FillBf16Products(table);
  FillQuantizedAttention(table);
}

}  // namespace allspark::kernels
