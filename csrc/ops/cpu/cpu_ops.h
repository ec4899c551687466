// CpuOps: operations of the CPU. Each cuts its work into parts, independently of timing, and calls
// the kernel table for each on the pool. One kernel call computes an output element whole, or
// attention merges partial results in a fixed order (attention.cc). Several step threads may call
// at once: what a call needs besides its operands is on its stack or in its scratch memory.
#pragma once

#include "kernels/kernel_table.h"
#include "ops/device_ops.h"
#include "platform/thread_pool.h"

namespace allspark {

class CpuOps final : public DeviceOps {
 public:
  // Both outlive it.
  CpuOps(const kernels::KernelTable& kernels, ThreadPool& pool) : kernels_(kernels), pool_(pool) {}

  const char* name() const override { return kernels_.name; }
  bool Has(OpKind kind, DType first, DType second) const override;
  int64_t num_scratch_rows() const override { return pool_.num_threads(); }
  int64_t AttentionScratch(const AttentionParams& params) const override;

  void Upload(void* device, const void* host, size_t bytes) override;
  void Download(void* host, const void* device, size_t bytes) override;
  void Linear(const ConstMatrix& x, const LinearWeight& w, bool accumulate, const Matrix& y,
              std::span<const kernels::LowRank> low_rank) override;
  void FusedLinear(const ConstMatrix& x, const LinearWeight& w, kernels::Activation activation,
                   bool gated, const Matrix& y,
                   std::span<const kernels::LowRank> low_rank) override;
  void LinearEach(std::span<const LinearTask> tasks) override;
  void LinearExperts(const ExpertsTask& task, int64_t num_experts, const Routing& routing,
                     const LinearTask* shared) override;
  void FusedExperts(const ExpertsTask& task, int64_t num_experts, const Routing& routing,
                    const LinearTask* shared, kernels::Activation activation) override;
  void ShrinkLora(const ConstMatrix& x, std::span<LoraRows> rows,
                  const LoraScratch& scratch) override;
  void AddLoraEmbedding(const int32_t* ids, std::span<LoraRows> rows, const LoraScratch& scratch,
                        const Matrix& y) override;
  void KvWrite(const KvLayer& kv, const SequenceRanges& sequences, const ConstMatrix& k,
               const ConstMatrix& v) override;
  void Attention(const AttentionParams& params, const KvLayer& kv, const SequenceRanges& sequences,
                 const ConstMatrix& q, float* scratch, const Matrix& out) override;
  void Embedding(const EmbeddingWeight& table, const int32_t* ids, bool accumulate,
                 const Matrix& out) override;
  void Norm(const ConstMatrix& x, const int64_t* row_ids, const NormWeight& norm,
            const RowScratch& scratch, const Matrix& y) override;
  void NormHeads(const Matrix& x, int64_t head_begin, int64_t num_heads, int64_t head_dim,
                 const NormWeight& norm) override;
  void Rope(const Matrix& x, int64_t heads, int64_t head_dim, const int32_t* positions,
            const RopeView& rope) override;
  void Hadamard(const ConstMatrix& x, int64_t size, const Matrix& y) override;
  void LogN(const int32_t* positions, int64_t trained_length, const Matrix& x) override;
  void GatedAct(kernels::Activation activation, bool gated, const ConstMatrix& x,
                const RowScratch& scratch, const Matrix& out) override;
  void Scale(const ConstMatrix& x, const Scaling& scaling, bool accumulate,
             const Matrix& y) override;
  void Convert(const ConstMatrix& x, const Matrix& y) override;
  void Quantize(const ConstMatrix& x, const Matrix& q) override;
  void GatherColumns(const ConstMatrix& x, const int32_t* order, const Matrix& y) override;
  void GatherRows(const ConstMatrix& x, const int32_t* tokens, const Matrix& y) override;
  void Route(const ConstMatrix& logits, const RouterParams& router,
             const Routing& routing) override;
  void CombineExperts(const ConstMatrix& x, const RouterParams& router, const Routing& routing,
                      bool accumulate, const Matrix& y) override;
  void ArgMax(const ConstMatrix& x, int32_t* index) override;

 private:
  const kernels::KernelTable& kernels_;
  ThreadPool& pool_;
};

}  // namespace allspark
