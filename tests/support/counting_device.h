// CountingDevice: the least that a device needs, and what a new one costs. It computes as the CPU
// does, in memory of its own, and counts what it is asked for: a device behind a bus or a driver
// pays for each of these.
#pragma once

#include <memory>
#include <utility>

#include "ops/cpu/cpu_device.h"

namespace allspark::testing {

// One step thread at a time.
class CountingOps final : public DeviceOps {
 public:
  struct Counts {
    int64_t uploads = 0, bytes_uploaded = 0, launches = 0;
    int64_t downloads = 0, bytes_downloaded = 0;
  };

  CountingOps(const kernels::KernelTable& kernels, ThreadPool& pool) : cpu_(kernels, pool) {}
  Counts TakeCounts() { return std::exchange(counts_, {}); }
  void CountTokens(int64_t count) {
    ++counts_.launches;
    ++counts_.downloads;
    counts_.bytes_downloaded += count * static_cast<int64_t>(sizeof(int32_t));
  }

  const char* name() const override { return cpu_.name(); }
  bool Has(OpKind kind, DType first, DType second) const override {
    return cpu_.Has(kind, first, second);
  }
  int64_t num_scratch_rows() const override { return cpu_.num_scratch_rows(); }
  int64_t AttentionScratch(const AttentionParams& params) const override {
    return cpu_.AttentionScratch(params);
  }

  void Upload(void* device, const void* host, size_t bytes) override {
    ++counts_.uploads;
    counts_.bytes_uploaded += static_cast<int64_t>(bytes);
    cpu_.Upload(device, host, bytes);
  }
  void Download(void* host, const void* device, size_t bytes) override {
    ++counts_.downloads;
    counts_.bytes_downloaded += static_cast<int64_t>(bytes);
    cpu_.Download(host, device, bytes);
  }
  void Linear(const ConstMatrix& x, const LinearWeight& w, bool accumulate, const Matrix& y,
              std::span<const kernels::LowRank> low_rank) override {
    Launch().Linear(x, w, accumulate, y, low_rank);
  }
  void FusedLinear(const ConstMatrix& x, const LinearWeight& w, kernels::Activation activation,
                   bool gated, const Matrix& y,
                   std::span<const kernels::LowRank> low_rank) override {
    Launch().FusedLinear(x, w, activation, gated, y, low_rank);
  }
  void LinearEach(std::span<const LinearTask> tasks) override { Launch().LinearEach(tasks); }
  void LinearExperts(const ExpertsTask& task, int64_t num_experts, const Routing& routing,
                     const LinearTask* shared) override {
    Launch().LinearExperts(task, num_experts, routing, shared);
  }
  void FusedExperts(const ExpertsTask& task, int64_t num_experts, const Routing& routing,
                    const LinearTask* shared, kernels::Activation activation) override {
    Launch().FusedExperts(task, num_experts, routing, shared, activation);
  }
  void ShrinkLora(const ConstMatrix& x, std::span<LoraRows> rows,
                  const LoraScratch& scratch) override {
    Launch().ShrinkLora(x, rows, scratch);
  }
  void AddLoraEmbedding(const int32_t* ids, std::span<LoraRows> rows, const LoraScratch& scratch,
                        const Matrix& y) override {
    Launch().AddLoraEmbedding(ids, rows, scratch, y);
  }
  void KvWrite(const KvLayer& kv, const SequenceRanges& sequences, const ConstMatrix& k,
               const ConstMatrix& v) override {
    Launch().KvWrite(kv, sequences, k, v);
  }
  void Attention(const AttentionParams& params, const KvLayer& kv, const SequenceRanges& sequences,
                 const ConstMatrix& q, float* scratch, const Matrix& out) override {
    Launch().Attention(params, kv, sequences, q, scratch, out);
  }
  void Embedding(const EmbeddingWeight& table, const int32_t* ids, bool accumulate,
                 const Matrix& out) override {
    Launch().Embedding(table, ids, accumulate, out);
  }
  void Norm(const ConstMatrix& x, const int64_t* row_ids, const NormWeight& norm,
            const RowScratch& scratch, const Matrix& y) override {
    Launch().Norm(x, row_ids, norm, scratch, y);
  }
  void NormHeads(const Matrix& x, int64_t head_begin, int64_t num_heads, int64_t head_dim,
                 const NormWeight& norm) override {
    Launch().NormHeads(x, head_begin, num_heads, head_dim, norm);
  }
  void Rope(const Matrix& x, int64_t heads, int64_t head_dim, const int32_t* positions,
            const RopeView& rope) override {
    Launch().Rope(x, heads, head_dim, positions, rope);
  }
  void Hadamard(const ConstMatrix& x, int64_t size, const Matrix& y) override {
    Launch().Hadamard(x, size, y);
  }
  void LogN(const int32_t* positions, int64_t trained_length, const Matrix& x) override {
    Launch().LogN(positions, trained_length, x);
  }
  void GatedAct(kernels::Activation activation, bool gated, const ConstMatrix& x,
                const RowScratch& scratch, const Matrix& out) override {
    Launch().GatedAct(activation, gated, x, scratch, out);
  }
  void Scale(const ConstMatrix& x, const Scaling& scaling, bool accumulate,
             const Matrix& y) override {
    Launch().Scale(x, scaling, accumulate, y);
  }
  void Convert(const ConstMatrix& x, const Matrix& y) override { Launch().Convert(x, y); }
  void Quantize(const ConstMatrix& x, const Matrix& q) override { Launch().Quantize(x, q); }
  void GatherColumns(const ConstMatrix& x, const int32_t* order, const Matrix& y) override {
    Launch().GatherColumns(x, order, y);
  }
  void GatherRows(const ConstMatrix& x, const int32_t* tokens, const Matrix& y) override {
    Launch().GatherRows(x, tokens, y);
  }
  void Route(const ConstMatrix& logits, const RouterParams& router,
             const Routing& routing) override {
    Launch().Route(logits, router, routing);
  }
  void CombineExperts(const ConstMatrix& x, const RouterParams& router, const Routing& routing,
                      bool accumulate, const Matrix& y) override {
    Launch().CombineExperts(x, router, routing, accumulate, y);
  }
  void ArgMax(const ConstMatrix& x, int32_t* index) override { Launch().ArgMax(x, index); }

 private:
  CpuOps& Launch() {
    ++counts_.launches;
    return cpu_;
  }

  CpuOps cpu_;
  Counts counts_;
};

// The chosen tokens come back as one download. Rows, edits and masks, which a device without access
// to the host's memory would be given for it, are not counted.
class CountingSampler final : public Sampler {
 public:
  CountingSampler(std::unique_ptr<Sampler> sampler, CountingOps& ops)
      : sampler_(std::move(sampler)), ops_(ops) {}

  void Sample(SamplingRow* rows, int64_t num_rows) override {
    ops_.CountTokens(num_rows);
    sampler_->Sample(rows, num_rows);
  }

 private:
  const std::unique_ptr<Sampler> sampler_;
  CountingOps& ops_;
};

class CountingDevice final : public CpuDevice {
 public:
  explicit CountingDevice(const Parts& parts)
      : CpuDevice(parts), counting_(std::make_unique<CountingOps>(*parts.kernels, *parts.pool)) {}

  CountingOps& ops() const override { return *counting_; }
  bool has_own_memory() const override { return true; }
  std::unique_ptr<Sampler> MakeSampler(int64_t vocab_size) const override {
    return std::make_unique<CountingSampler>(CpuDevice::MakeSampler(vocab_size), *counting_);
  }

 private:
  std::unique_ptr<CountingOps> counting_;
};

}  // namespace allspark::testing
