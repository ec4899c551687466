// Puts the vector kernels into a table, for FillAvx2, FillAvx512 and FillNeon.
#pragma once

#include "kernels/cpu/attention.inl"
#include "kernels/cpu/cache.inl"
#include "kernels/cpu/cache_quantized.inl"
#include "kernels/cpu/gemm.inl"
#include "kernels/cpu/moe.inl"
#include "kernels/cpu/quantized.inl"
#include "kernels/cpu/rowwise.inl"
#include "kernels/cpu/widened.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {
namespace {

// T: the C++ type of the dtype's elements, uint16_t for bfloat16.
template <class T, class Dot>
static AS_ALWAYS_INLINE void FillDType(KernelTable& table, DType dtype) {
  const int i = static_cast<int>(dtype);
  FillGemm<GemmPlain<T, Dot>>(table, dtype, dtype);
  table.low_rank[i] = AddLowRank<T, Dot>;
  table.rms_norm[i] = RmsNorm<T>;
  table.layer_norm[i] = LayerNorm<T>;
  table.gated_act[i] = GatedAct<T>;
  table.embedding[i] = Embedding<T>;
  table.kv_write[i] = KvWrite<T>;
  table.attention_merge[i] = AttentionMerge<T>;
  FillAttention<CacheHead<T>, Dot>(table, dtype);
}

// Weights of float16, with float32 around them.
static AS_ALWAYS_INLINE void FillHalfWeights(KernelTable& table) {
  FillGemm<GemmHalf>(table, DType::kFloat16, DType::kFloat32);
  table.embedding[static_cast<int>(DType::kFloat16)] = Embedding<Float16>;
}

static AS_ALWAYS_INLINE void FillQuantizedWeights(KernelTable& table) {
  FillForms<InBytes<ByteTiles>>(table, DType::kInt8);
  FillForms<Widened<float, DotFloat>>(table, DType::kFloat32);
  FillForms<Widened<uint16_t, DotFloat>>(table, DType::kBFloat16);
  table.embedding[static_cast<int>(DType::kUInt8)] = EmbeddingQuantized<Form::kBytes>;
  table.embedding[static_cast<int>(DType::kUInt4)] = EmbeddingQuantized<Form::kNibbles>;
  table.embedding[static_cast<int>(DType::kFloat8E4M3)] = EmbeddingQuantized<Form::kFloat8>;
}

static AS_ALWAYS_INLINE void FillQuantizedCache(KernelTable& table) {
  table.kv_write[static_cast<int>(DType::kInt8)] = KvWriteQuantized<8, 8>;
  table.kv_write[static_cast<int>(DType::kUInt4)] = KvWriteQuantized<4, 4>;
  table.kv_write[static_cast<int>(DType::kInt8UInt4)] = KvWriteQuantized<8, 4>;
  FillQuantizedAttention(table);
}

static AS_ALWAYS_INLINE void FillVectorKernels(KernelTable& table) {
  FillDType<float, DotFloat>(table, DType::kFloat32);
  FillDType<uint16_t, DotPair>(table, DType::kBFloat16);
  FillHalfWeights(table);
  FillQuantizedWeights(table);
  FillQuantizedCache(table);
  table.convert[static_cast<int>(DType::kFloat32)][static_cast<int>(DType::kBFloat16)] =
      Convert<uint16_t>;
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
