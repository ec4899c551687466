// Kernels that AMX makes faster than AVX-512's dot products: every GEMM except those with float32
// activations. The rules of kernels_avx2.cc apply here too.
#define AS_KERNELS_NATIVE_VNNI 1
#define AS_KERNELS_NATIVE_BF16 1
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/amx.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillAmx(KernelTable& table) noexcept {
  const DType bf16 = DType::kBFloat16;
  FillGemm<OnAmx<GemmPlain<uint16_t, DotAmx>>>(table, bf16, bf16);
  table.low_rank[static_cast<int>(bf16)] = AddLowRankOnAmx;
  FillForms<FamilyOnAmx<Widened<uint16_t, DotAmx>>>(table, bf16);
  FillForms<FamilyOnAmx<InBytes<AmxByteTiles>>>(table, DType::kInt8);
}

}  // namespace allspark::kernels
