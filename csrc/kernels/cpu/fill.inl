// Puts the vector kernels into a table, for FillAvx2, FillAvx512 and FillNeon.
#pragma once

#include "kernels/cpu/attention.inl"
#include "kernels/cpu/cache.inl"
#include "kernels/cpu/cache_quantized.inl"
#include "kernels/cpu/gemm.inl"
#include "kernels/cpu/moe.inl"
#include "kernels/cpu/quantized.inl"
#include "kernels/cpu/rowwise.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {
namespace {

// T: the C++ type of the dtype's elements, uint16_t for bfloat16.
template <class T, class Dot>
AS_ALWAYS_INLINE void FillDType(KernelTable& table, DType dtype) {
  const int i = static_cast<int>(dtype);
  FillGemm<GemmPlain<T, Dot>>(table, dtype, dtype);
  table.low_rank[i] = AddLowRank<T, Dot>;
  table.rms_norm[i] = RmsNorm<T>;
  table.layer_norm[i] = LayerNorm<T>;
  table.gated_act[i] = GatedAct<T>;
  table.embedding[i] = Embedding<T>;
  table.kv_write[i] = KvWrite<T>;
  table.attention_merge[i] = AttentionMerge<T>;
  table.convert[static_cast<int>(DType::kInt8)][i] = Convert<int8_t, T>;
  FillAttention<CacheHead<T>, Dot>(table, dtype);
}

// Weights of kBits bits with every activation dtype.
template <int kBits>
AS_ALWAYS_INLINE void FillQuantized(KernelTable& table, DType dtype) {
  FillGemm<GemmBytes<kBits>>(table, dtype, DType::kInt8);
  FillGemm<GemmWidened<float, DotFloat, kBits>>(table, dtype, DType::kFloat32);
  FillGemm<GemmWidened<uint16_t, DotPair, kBits>>(table, dtype, DType::kBFloat16);
  table.embedding[static_cast<int>(dtype)] = EmbeddingQuantized<kBits>;
}

template <int kKeyBits, int kValueBits>
AS_ALWAYS_INLINE void FillQuantizedCache(KernelTable& table, DType cache) {
  table.kv_write[static_cast<int>(cache)] = KvWriteQuantized<kKeyBits, kValueBits>;
  FillAttention<QuantizedHead<kKeyBits, kValueBits>, DotInteger>(table, cache);
}

AS_ALWAYS_INLINE void FillVectorKernels(KernelTable& table) {
  FillDType<float, DotFloat>(table, DType::kFloat32);
  FillDType<uint16_t, DotPair>(table, DType::kBFloat16);
  FillQuantized<8>(table, DType::kUInt8);
  FillQuantized<4>(table, DType::kUInt4);
  FillQuantizedCache<8, 8>(table, DType::kInt8);
  FillQuantizedCache<4, 4>(table, DType::kUInt4);
  FillQuantizedCache<8, 4>(table, DType::kInt8UInt4);
  table.convert[static_cast<int>(DType::kFloat32)][static_cast<int>(DType::kBFloat16)] =
      Convert<float, uint16_t>;
  table.quantize = Quantize;
  table.scale = Scale;
  table.route = Route;
  table.combine = Combine;
  table.rope = Rope;
  table.hadamard = Hadamard;
  table.argmax = ArgMax;
  table.sum_exp = SumExp;
}

}  // namespace
}  // namespace allspark::kernels
