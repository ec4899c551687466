// DeviceOps: what a device computes, one call for each operation over all rows of a step. Every
// device implements it in a folder of its own (ops/cpu). The ops have checked the operands before,
// and nobody else calls. Operands lie in the device's memory; spans, and what they name by pointers
// of the ops' own types, in the host's, and are read before the call returns. Calls take effect in
// their order, the device's own copies included. No cut into threads or blocks changes a bit of a
// result: every output element is reduced in one order that depends on its own row alone. A model's
// step thread calls; other threads may Upload to memory that no operation uses yet.
#pragma once

#include <cstdint>
#include <span>

#include "ops/attention.h"
#include "ops/embedding.h"
#include "ops/experts.h"
#include "ops/kv_pool.h"
#include "ops/linear.h"
#include "ops/linear_each.h"
#include "ops/lora.h"
#include "ops/moe.h"
#include "ops/norm.h"
#include "ops/op_context.h"
#include "ops/rope.h"
#include "ops/scale.h"
#include "ops/sequence_range.h"

namespace allspark {

// What a device may have or lack, by up to two dtypes.
enum class OpKind {
  kLinear,       // of the weight and of its input
  kFusedLinear,  // the same: a product with its activation, in one pass
  kLowRank,      // of an adapter
  kRmsNorm,      // of the result, like the next three
  kLayerNorm,
  kGatedAct,
  kGatherColumns,
  kEmbedding,  // of the table
  kKvWrite,    // of the cache
  kAttention,  // of the cache and of the result
  kConvert,    // of the source and of the result
  kQuantize,   // these need no dtype
  kScale,
  kRoute,
  kCombine,
  kRope,
  kHadamard,
  kArgMax,
};

class DeviceOps {
 public:
  virtual ~DeviceOps() = default;

  // Of the set of kernels, for messages and statistics.
  virtual const char* name() const = 0;
  virtual bool Has(OpKind kind, DType first = DType::kUndefined,
                   DType second = DType::kUndefined) const = 0;
  virtual int64_t num_scratch_rows() const = 0;
  // Floats of scratch memory of Attention.
  virtual int64_t AttentionScratch(const AttentionParams& params) const = 0;

  // Between the device's memory and the host's. When they return, what is on the host has been read
  // or written. They throw on failure.
  virtual void Upload(void* device, const void* host, size_t bytes) = 0;
  virtual void Download(void* host, const void* device, size_t bytes) = 0;

  // The ops of the same names say what these compute.
  virtual void Linear(const ConstMatrix& x, const LinearWeight& w, bool accumulate, const Matrix& y,
                      std::span<const kernels::LowRank> low_rank) = 0;
  // y is float32 or bfloat16. Requires: kFusedLinear, and where gated whole panels of gate and up.
  virtual void FusedLinear(const ConstMatrix& x, const LinearWeight& w,
                           kernels::Activation activation, bool gated, const Matrix& y,
                           std::span<const kernels::LowRank> low_rank) = 0;
  virtual void LinearEach(std::span<const LinearTask> tasks) = 0;
  // shared null: there is none. FusedExperts: as FusedLinear, gated, of all.
  virtual void LinearExperts(const ExpertsTask& task, int64_t num_experts, const Routing& routing,
                             const LinearTask* shared) = 0;
  virtual void FusedExperts(const ExpertsTask& task, int64_t num_experts, const Routing& routing,
                            const LinearTask* shared, kernels::Activation activation) = 0;
  virtual void ShrinkLora(const ConstMatrix& x, std::span<LoraRows> rows,
                          const LoraScratch& scratch) = 0;
  virtual void AddLoraEmbedding(const int32_t* ids, std::span<LoraRows> rows,
                                const LoraScratch& scratch, const Matrix& y) = 0;

  virtual void KvWrite(const KvLayer& kv, const SequenceRanges& sequences, const ConstMatrix& k,
                       const ConstMatrix& v) = 0;
  virtual void Attention(const AttentionParams& params, const KvLayer& kv,
                         const SequenceRanges& sequences, const ConstMatrix& q, float* scratch,
                         const Matrix& out) = 0;

  virtual void Embedding(const EmbeddingWeight& table, const int32_t* ids, bool accumulate,
                         const Matrix& out) = 0;
  // row_ids null: all rows of x, in their order.
  virtual void Norm(const ConstMatrix& x, const int64_t* row_ids, const NormWeight& norm,
                    const RowScratch& scratch, const Matrix& y) = 0;
  virtual void NormHeads(const Matrix& x, int64_t head_begin, int64_t num_heads, int64_t head_dim,
                         const NormWeight& norm) = 0;
  virtual void Rope(const Matrix& x, int64_t heads, int64_t head_dim, const int32_t* positions,
                    const RopeView& rope) = 0;
  virtual void Hadamard(const ConstMatrix& x, int64_t size, const Matrix& y) = 0;
  virtual void LogN(const int32_t* positions, int64_t trained_length, const Matrix& x) = 0;
  virtual void GatedAct(kernels::Activation activation, bool gated, const ConstMatrix& x,
                        const RowScratch& scratch, const Matrix& out) = 0;
  virtual void Scale(const ConstMatrix& x, const Scaling& scaling, bool accumulate,
                     const Matrix& y) = 0;
  virtual void Convert(const ConstMatrix& x, const Matrix& y) = 0;
  virtual void Quantize(const ConstMatrix& x, const Matrix& q) = 0;
  virtual void GatherColumns(const ConstMatrix& x, const int32_t* order, const Matrix& y) = 0;
  virtual void GatherRows(const ConstMatrix& x, const int32_t* tokens, const Matrix& y) = 0;
  virtual void Route(const ConstMatrix& logits, const RouterParams& router,
                     const Routing& routing) = 0;
  virtual void CombineExperts(const ConstMatrix& x, const RouterParams& router,
                              const Routing& routing, bool accumulate, const Matrix& y) = 0;
  virtual void ArgMax(const ConstMatrix& x, int32_t* index) = 0;
};

}  // namespace allspark
