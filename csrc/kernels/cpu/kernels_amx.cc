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
  FillGemm<OnAmx<GemmWidened<uint16_t, DotAmx, 8>>>(table, DType::kUInt8, bf16);
  FillGemm<OnAmx<GemmWidened<uint16_t, DotAmx, 4>>>(table, DType::kUInt4, bf16);
  FillGemm<OnAmx<GemmBytes<8, AmxByteTiles>>>(table, DType::kUInt8, DType::kInt8);
  FillGemm<OnAmx<GemmBytes<4, AmxByteTiles>>>(table, DType::kUInt4, DType::kInt8);
}

}  // namespace allspark::kernels
