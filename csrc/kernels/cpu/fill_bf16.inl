// The kernels that are faster on a processor with a bfloat16 dot product: GEMM with bfloat16
// activations, and attention over a bfloat16 cache, which rounds queries and weights to bfloat16.
#pragma once

#include "kernels/cpu/attention.inl"
#include "kernels/cpu/gemm.inl"
#include "kernels/cpu/widened.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {
namespace {

template <class Dot>
static AS_ALWAYS_INLINE void FillBf16Gemm(KernelTable& table) {
  const DType bf16 = DType::kBFloat16;
  FillGemm<GemmPlain<uint16_t, Dot>>(table, bf16, bf16);
  table.low_rank[static_cast<int>(bf16)] = AddLowRank<uint16_t, Dot>;
  FillForms<Widened<uint16_t, Dot>>(table, bf16);
}

static AS_ALWAYS_INLINE void FillBf16Products(KernelTable& table) {
  FillBf16Gemm<DotNative>(table);
  FillAttention<CacheHead<uint16_t>, DotNative>(table, DType::kBFloat16);
}

}  // namespace
}  // namespace allspark::kernels
