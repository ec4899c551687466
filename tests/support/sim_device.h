// SimDevice: a device that computes what the CPU does, but whose memory the host cannot touch and
// whose operations run late. Its memory has two views: the one that the program knows has no access
// rights, so that a read or write by the host faults on the spot; the other serves the operations.
// They wait in a queue until the host asks for a result (Download), so that nobody gets away with
// changing what an operation still has to read. An operation that is given host memory throws.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/allocator.h"
#include "ops/cpu/cpu_device.h"

namespace allspark::testing {

// The memory of a SimDevice. Every allocation also takes as much of `tickets`, which thereby counts
// and may refuse it. Thread-safe.
class SimMemory final : public Allocator {
 public:
  explicit SimMemory(std::shared_ptr<Allocator> tickets);
  ~SimMemory() override;

  void* Allocate(size_t bytes) override;
  void Free(void* ptr) override;
  AllocatorStats Stats() const override { return tickets_->Stats(); }

  // The same byte in the view that has access; null stays null. Throws InternalError for memory
  // that is not the device's.
  template <typename T>
  T* Reach(T* ptr) const {
    return const_cast<T*>(static_cast<const T*>(ReachByte(ptr)));
  }

 private:
  struct Chunk {
    size_t bytes;
    void* ticket;
  };
  const void* ReachByte(const void* ptr) const;

  const std::shared_ptr<Allocator> tickets_;
  int file_ = -1;
  unsigned char* closed_ = nullptr;  // the view without access
  unsigned char* open_ = nullptr;
  mutable std::mutex mutex_;
  std::map<size_t, Chunk> used_;  // by offset; guarded by mutex_
};

// The operations: those of the CPU on the other view, late.
class SimOps final : public DeviceOps {
 public:
  SimOps(const CpuDevice::Parts& parts, const SimMemory& memory)
      : memory_(memory), cpu_(*parts.kernels, *parts.pool) {}

  // Runs what waits.
  void Finish();
  void Defer(std::function<void()> run) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(run));
  }
  size_t num_waiting() {
    const std::lock_guard lock(mutex_);
    return waiting_.size();
  }

  const char* name() const override { return cpu_.name(); }
  bool Has(OpKind kind, DType first, DType second) const override {
    return cpu_.Has(kind, first, second);
  }
  int64_t num_scratch_rows() const override { return cpu_.num_scratch_rows(); }
  int64_t AttentionScratch(const AttentionParams& params) const override {
    return cpu_.AttentionScratch(params);
  }
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
  // The same operands in the view that has access. Those that own copies of spans are made by
  // value.
  template <typename T>
  T* At(T* ptr) const {
    return memory_.Reach(ptr);
  }
  Matrix At(Matrix x) const;
  ConstMatrix At(ConstMatrix x) const;
  WeightScales At(WeightScales scales) const;
  LinearWeight At(LinearWeight w) const;
  NormWeight At(NormWeight norm) const;
  Routing At(Routing routing) const;
  RowScratch At(RowScratch scratch) const;
  LoraScratch At(LoraScratch scratch) const;
  ExpertsTask At(ExpertsTask task) const;
  KvLayer At(KvLayer kv) const;
  std::vector<kernels::LowRank> At(std::span<const kernels::LowRank> low_rank) const;
  std::vector<SequenceRange> At(const SequenceRanges& sequences) const;
  struct Task;
  Task At(const LinearTask& task) const;
  struct AdapterRows;
  AdapterRows At(std::span<LoraRows> rows) const;

  // Queues an operation, which `run` does on the CPU's.
  template <typename Run>
  void Queue(Run run) {
    Defer([this, run = std::move(run)]() mutable { run(cpu_); });
  }

  const SimMemory& memory_;
  CpuOps cpu_;
  std::mutex mutex_;  // An adapter may be loaded while the model runs.
  std::vector<std::function<void()>> waiting_;
};

class SimDevice : public Device {
 public:
  explicit SimDevice(CpuDevice::Parts parts);

  Allocator* allocator() const override { return memory_.get(); }
  SimOps& ops() const override { return *ops_; }
  DeviceRoom room() const override { return host_.room(); }
  int64_t KvBlockBytes(const KvShape& shape) const override { return host_.KvBlockBytes(shape); }
  void CopyBlock(const KvPool& pool, int32_t from, int32_t to) override;
  void BlockToHost(const KvPool& pool, int32_t block, void* host) override;
  void BlockFromHost(const void* host, const KvPool& pool, int32_t block) override;
  void Finish() override { ops_->Finish(); }
  bool has_own_memory() const override { return true; }
  int64_t host_cache_bytes() const override { return parts_.host_cache_bytes(); }
  std::unique_ptr<Sampler> MakeSampler(int64_t vocab_size) const override;
  ThreadPool& host_pool() const override { return host_.host_pool(); }
  const kernels::KernelTable& host_kernels() const override { return host_.host_kernels(); }

 private:
  KvPool At(KvPool pool) const;

  const CpuDevice::Parts parts_;
  CpuDevice host_;
  std::unique_ptr<SimMemory> memory_;
  std::unique_ptr<SimOps> ops_;
};

// Whether tests are to run on a SimDevice: ALLSPARK_TEST_DEVICE is "sim".
bool TestsUseSim();
// The device of a test: a SimDevice, or the CPU over these parts.
std::shared_ptr<Device> MakeTestDevice(CpuDevice::Parts parts);

}  // namespace allspark::testing
