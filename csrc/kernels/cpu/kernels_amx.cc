// Kernels that AMX makes faster than AVX-512's dot products: every GEMM except those with float32
// activations, and attention over a bfloat16 cache. The rules of kernels_avx2.cc apply here too.
#define AS_KERNELS_NATIVE_VNNI 1
#define AS_KERNELS_NATIVE_BF16 1
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/amx_attention.inl"
#include "kernels/cpu/amx_gemm.inl"
#include "kernels/cpu/amx_groups.inl"
#include "kernels/cpu/amx_wide.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillAmx(KernelTable& table) noexcept {
  const DType bf16 = DType::kBFloat16;
  // Reading all weights once per thread takes as long as multiplying on tiles.
  table.local_rows = int64_t{1} << 40;
  FillGemm<OnAmx<AmxGemm>>(table, bf16, bf16);
  table.low_rank[static_cast<int>(bf16)] = AddLowRankOnAmx;
  table.attention[static_cast<int>(bf16)][static_cast<int>(DType::kFloat32)] =
      AttentionOnAmx<float>;
  table.attention[static_cast<int>(bf16)][static_cast<int>(bf16)] = AttentionOnAmx<uint16_t>;
  FillForms<FamilyOnAmx<AmxWidenedForms>>(table, bf16);
  FillForms<FamilyOnAmx<InBytes<AmxGroupTiles>>>(table, DType::kInt8);
}

}  // namespace allspark::kernels
