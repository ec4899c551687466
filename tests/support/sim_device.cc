#include "support/sim_device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/int_math.h"

namespace allspark::testing {
namespace {

// Samples from logits in the view that has access; rows are the caller's again afterwards.
class SimSampler final : public Sampler {
 public:
  SimSampler(std::unique_ptr<Sampler> host, SimOps& ops, const SimMemory& memory)
      : host_(std::move(host)), ops_(ops), memory_(memory) {}

  void Sample(SamplingRow* rows, int64_t num_rows) override {
    ops_.Finish();
    closed_.clear();
    for (int64_t i = 0; i < num_rows; ++i) {
      closed_.push_back(rows[i].logits);
      rows[i].logits = memory_.Reach(rows[i].logits);
    }
    host_->Sample(rows, num_rows);
    for (int64_t i = 0; i < num_rows; ++i) rows[i].logits = closed_[static_cast<size_t>(i)];
  }

 private:
  const std::unique_ptr<Sampler> host_;
  SimOps& ops_;
  const SimMemory& memory_;
  std::vector<float*> closed_;
};

// Of address space; memory is taken when it is first written.
constexpr size_t kRegionBytes = size_t{4} << 30;
constexpr size_t kPage = 4096;

}  // namespace

SimMemory::SimMemory(std::shared_ptr<Allocator> tickets) : tickets_(std::move(tickets)) {
  file_ = memfd_create("allspark-sim", MFD_CLOEXEC);
  const auto map = [&](int access) {
    void* const view = mmap(nullptr, kRegionBytes, access, MAP_SHARED | MAP_NORESERVE, file_, 0);
    return view == MAP_FAILED ? nullptr : static_cast<unsigned char*>(view);
  };
  if (file_ < 0 || ftruncate(file_, kRegionBytes) != 0 || (closed_ = map(PROT_NONE)) == nullptr ||
      (open_ = map(PROT_READ | PROT_WRITE)) == nullptr) {
    throw std::runtime_error("no memory for a simulated device");
  }
}

SimMemory::~SimMemory() {
  munmap(closed_, kRegionBytes);
  munmap(open_, kRegionBytes);
  close(file_);
}

void* SimMemory::Allocate(size_t bytes) {
  void* const ticket = tickets_->Allocate(bytes);
  if (ticket == nullptr) return nullptr;
  const std::lock_guard lock(mutex_);
  size_t at = 0;
  for (const auto& [offset, chunk] : used_) {
    if (offset - at >= bytes) break;
    at = static_cast<size_t>(
        AlignUp(static_cast<int64_t>(offset + chunk.bytes), static_cast<int64_t>(kPage)));
  }
  if (at + bytes > kRegionBytes) {
    tickets_->Free(ticket);
    return nullptr;
  }
  used_[at] = {bytes, ticket};
  return closed_ + at;
}

void SimMemory::Free(void* ptr) {
  if (ptr == nullptr) return;
  const std::lock_guard lock(mutex_);
  const auto at = static_cast<size_t>(static_cast<unsigned char*>(ptr) - closed_);
  const auto chunk = used_.find(at);
  AS_CHECK(chunk != used_.end()) << "sim: " << ptr << " was not allocated";
  tickets_->Free(chunk->second.ticket);
  // The next owner finds zeros, and the system its memory.
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
            static_cast<off_t>(chunk->second.bytes));
  used_.erase(chunk);
}

const void* SimMemory::ReachByte(const void* ptr) const {
  if (ptr == nullptr) return nullptr;
  const auto* const byte = static_cast<const unsigned char*>(ptr);
  AS_CHECK(byte >= closed_ && byte < closed_ + kRegionBytes)
      << "sim: an operation was given memory of the host";
  return open_ + (byte - closed_);
}

// What a queued operation keeps of a task and of adapters' rows.
struct SimOps::Task {
  LinearTask task;
  std::vector<kernels::LowRank> low_rank;
  LinearTask View() const {
    LinearTask view = task;
    view.low_rank = low_rank;
    return view;
  }
};
struct SimOps::AdapterRows {
  std::vector<LoraRows> rows;
  std::vector<std::unique_ptr<LoraWeight>> weights;
};

Matrix SimOps::At(Matrix x) const {
  x.data = At(x.data);
  x.row_scale = At(x.row_scale);
  x.row_sums = At(x.row_sums);
  return x;
}
ConstMatrix SimOps::At(ConstMatrix x) const {
  x.data = At(x.data);
  x.row_scale = At(x.row_scale);
  x.row_sums = At(x.row_sums);
  return x;
}
WeightScales SimOps::At(WeightScales scales) const {
  scales.scale = At(scales.scale);
  scales.zero = At(scales.zero);
  scales.offset = At(scales.offset);
  scales.block_scale = At(scales.block_scale);
  scales.block_offset = At(scales.block_offset);
  scales.table = At(scales.table);
  scales.high = At(scales.high);
  return scales;
}
LinearWeight SimOps::At(LinearWeight w) const {
  w.data = At(w.data);
  w.bias = At(w.bias);
  w.scales = At(w.scales);
  w.order = At(w.order);
  return w;
}
NormWeight SimOps::At(NormWeight norm) const {
  norm.weight = At(norm.weight);
  norm.bias = At(norm.bias);
  return norm;
}
Routing SimOps::At(Routing routing) const {
  routing.experts = At(routing.experts);
  routing.weights = At(routing.weights);
  routing.rows = At(routing.rows);
  routing.tokens = At(routing.tokens);
  routing.begins = At(routing.begins);
  return routing;
}
RowScratch SimOps::At(RowScratch scratch) const {
  scratch.data = At(scratch.data);
  return scratch;
}
LoraScratch SimOps::At(LoraScratch scratch) const {
  return {At(scratch.sums), {At(scratch.low.room)}};
}
ExpertsTask SimOps::At(ExpertsTask task) const {
  return {At(task.x), At(task.w), At(task.y), At(task.scratch)};
}
KvLayer SimOps::At(KvLayer kv) const {
  kv.pool.data = At(kv.pool.data);
  return kv;
}
std::vector<kernels::LowRank> SimOps::At(std::span<const kernels::LowRank> low_rank) const {
  std::vector<kernels::LowRank> copies(low_rank.begin(), low_rank.end());
  for (kernels::LowRank& low : copies) {
    low.a = At(low.a);
    low.b = At(low.b);
    low.a_scale = At(low.a_scale);
    low.a_sums = At(low.a_sums);
    low.b_scale = At(low.b_scale);
  }
  return copies;
}
std::vector<SequenceRange> SimOps::At(const SequenceRanges& sequences) const {
  At(sequences.device);
  std::vector<SequenceRange> copies(sequences.host.begin(), sequences.host.end());
  for (SequenceRange& sequence : copies) sequence.block_table = At(sequence.block_table);
  return copies;
}
SimOps::Task SimOps::At(const LinearTask& task) const {
  return {{At(task.x), At(task.w), At(task.y), At(task.scratch)}, At(task.low_rank)};
}
SimOps::AdapterRows SimOps::At(std::span<LoraRows> rows) const {
  AdapterRows copies;
  for (LoraRows range : rows) {
    auto weight = std::make_unique<LoraWeight>(*range.weight);
    weight->a = At(weight->a);
    weight->a_scale = At(weight->a_scale);
    for (LoraPart& part : weight->parts) {
      part.b = At(part.b);
      part.b_scale = At(part.b_scale);
    }
    range.weight = weight.get();
    copies.rows.push_back(range);
    copies.weights.push_back(std::move(weight));
  }
  return copies;
}

void SimOps::Finish() {
  const std::lock_guard lock(mutex_);
  for (auto& run : waiting_) run();
  std::vector<std::function<void()>>().swap(waiting_);  // with its capacity
}

void SimOps::Upload(void* device, const void* host, size_t bytes) {
  const auto* const begin = static_cast<const unsigned char*>(host);
  Defer([to = At(device), copy = std::vector<unsigned char>(begin, begin + bytes)] {
    if (!copy.empty()) std::memcpy(to, copy.data(), copy.size());
  });
}
void SimOps::Download(void* host, const void* device, size_t bytes) {
  Finish();
  std::memcpy(host, At(device), bytes);
}
void SimOps::Linear(const ConstMatrix& x, const LinearWeight& w, bool accumulate, const Matrix& y,
                    std::span<const kernels::LowRank> low_rank) {
  Queue([=, x = At(x), w = At(w), y = At(y), low = At(low_rank)](CpuOps& cpu) {
    cpu.Linear(x, w, accumulate, y, low);
  });
}
void SimOps::FusedLinear(const ConstMatrix& x, const LinearWeight& w,
                         kernels::Activation activation, bool gated, const Matrix& y,
                         std::span<const kernels::LowRank> low_rank) {
  Queue([=, x = At(x), w = At(w), y = At(y), low = At(low_rank)](CpuOps& cpu) {
    cpu.FusedLinear(x, w, activation, gated, y, low);
  });
}
void SimOps::LinearEach(std::span<const LinearTask> tasks) {
  std::vector<Task> copies;
  for (const LinearTask& task : tasks) copies.push_back(At(task));
  Queue([copies = std::move(copies)](CpuOps& cpu) {
    std::vector<LinearTask> views;
    for (const Task& task : copies) views.push_back(task.View());
    cpu.LinearEach(views);
  });
}
void SimOps::LinearExperts(const ExpertsTask& task, int64_t num_experts, const Routing& routing,
                           const LinearTask* shared) {
  Queue([=, task = At(task), routing = At(routing), has_shared = shared != nullptr,
         copy = shared == nullptr ? Task{} : At(*shared)](CpuOps& cpu) {
    const LinearTask view = copy.View();
    cpu.LinearExperts(task, num_experts, routing, has_shared ? &view : nullptr);
  });
}
void SimOps::FusedExperts(const ExpertsTask& task, int64_t num_experts, const Routing& routing,
                          const LinearTask* shared, kernels::Activation activation) {
  Queue([=, task = At(task), routing = At(routing), has_shared = shared != nullptr,
         copy = shared == nullptr ? Task{} : At(*shared)](CpuOps& cpu) {
    const LinearTask view = copy.View();
    cpu.FusedExperts(task, num_experts, routing, has_shared ? &view : nullptr, activation);
  });
}
void SimOps::ShrinkLora(const ConstMatrix& x, std::span<LoraRows> rows,
                        const LoraScratch& scratch) {
  Queue([x = At(x), copies = std::make_shared<AdapterRows>(At(rows)),
         scratch = At(scratch)](CpuOps& cpu) { cpu.ShrinkLora(x, copies->rows, scratch); });
}
void SimOps::AddLoraEmbedding(const int32_t* ids, std::span<LoraRows> rows,
                              const LoraScratch& scratch, const Matrix& y) {
  Queue([ids = At(ids), copies = std::make_shared<AdapterRows>(At(rows)), scratch = At(scratch),
         y = At(y)](CpuOps& cpu) { cpu.AddLoraEmbedding(ids, copies->rows, scratch, y); });
}
void SimOps::KvWrite(const KvLayer& kv, const SequenceRanges& sequences, const ConstMatrix& k,
                     const ConstMatrix& v) {
  Queue([kv = At(kv), ranges = At(sequences), k = At(k), v = At(v)](CpuOps& cpu) {
    cpu.KvWrite(kv, {ranges, ranges.data()}, k, v);
  });
}
void SimOps::Attention(const AttentionParams& params, const KvLayer& kv,
                       const SequenceRanges& sequences, const ConstMatrix& q, float* scratch,
                       const Matrix& out) {
  AttentionParams own = params;
  own.slopes = At(params.slopes);
  Queue([own, kv = At(kv), ranges = At(sequences), q = At(q), scratch = At(scratch), out = At(out)](
            CpuOps& cpu) { cpu.Attention(own, kv, {ranges, ranges.data()}, q, scratch, out); });
}
void SimOps::Embedding(const EmbeddingWeight& table, const int32_t* ids, bool accumulate,
                       const Matrix& out) {
  EmbeddingWeight own = table;
  own.data = At(table.data);
  own.scales = At(table.scales);
  Queue(
      [=, ids = At(ids), out = At(out)](CpuOps& cpu) { cpu.Embedding(own, ids, accumulate, out); });
}
void SimOps::Norm(const ConstMatrix& x, const int64_t* row_ids, const NormWeight& norm,
                  const RowScratch& scratch, const Matrix& y) {
  Queue([x = At(x), row_ids = At(row_ids), norm = At(norm), scratch = At(scratch),
         y = At(y)](CpuOps& cpu) { cpu.Norm(x, row_ids, norm, scratch, y); });
}
void SimOps::NormHeads(const Matrix& x, int64_t head_begin, int64_t num_heads, int64_t head_dim,
                       const NormWeight& norm) {
  Queue([=, x = At(x), norm = At(norm)](CpuOps& cpu) {
    cpu.NormHeads(x, head_begin, num_heads, head_dim, norm);
  });
}
void SimOps::Rope(const Matrix& x, int64_t heads, int64_t head_dim, const int32_t* positions,
                  const RopeView& rope) {
  RopeView own = rope;
  own.cos_sin = At(rope.cos_sin);
  Queue([=, x = At(x), positions = At(positions)](CpuOps& cpu) {
    cpu.Rope(x, heads, head_dim, positions, own);
  });
}
void SimOps::Hadamard(const ConstMatrix& x, int64_t size, const Matrix& y) {
  Queue([=, x = At(x), y = At(y)](CpuOps& cpu) { cpu.Hadamard(x, size, y); });
}
void SimOps::LogN(const int32_t* positions, int64_t trained_length, const Matrix& x) {
  Queue([=, positions = At(positions), x = At(x)](CpuOps& cpu) {
    cpu.LogN(positions, trained_length, x);
  });
}
void SimOps::GatedAct(kernels::Activation activation, bool gated, const ConstMatrix& x,
                      const RowScratch& scratch, const Matrix& out) {
  Queue([=, x = At(x), scratch = At(scratch), out = At(out)](CpuOps& cpu) {
    cpu.GatedAct(activation, gated, x, scratch, out);
  });
}
void SimOps::Scale(const ConstMatrix& x, const Scaling& scaling, bool accumulate, const Matrix& y) {
  Queue([=, x = At(x), y = At(y)](CpuOps& cpu) { cpu.Scale(x, scaling, accumulate, y); });
}
void SimOps::Convert(const ConstMatrix& x, const Matrix& y) {
  Queue([x = At(x), y = At(y)](CpuOps& cpu) { cpu.Convert(x, y); });
}
void SimOps::Quantize(const ConstMatrix& x, const Matrix& q) {
  Queue([x = At(x), q = At(q)](CpuOps& cpu) { cpu.Quantize(x, q); });
}
void SimOps::GatherColumns(const ConstMatrix& x, const int32_t* order, const Matrix& y) {
  Queue([x = At(x), order = At(order), y = At(y)](CpuOps& cpu) { cpu.GatherColumns(x, order, y); });
}
void SimOps::GatherRows(const ConstMatrix& x, const int32_t* tokens, const Matrix& y) {
  Queue([x = At(x), tokens = At(tokens), y = At(y)](CpuOps& cpu) { cpu.GatherRows(x, tokens, y); });
}
void SimOps::Route(const ConstMatrix& logits, const RouterParams& router, const Routing& routing) {
  RouterParams own = router;
  own.bias = At(router.bias);
  Queue([=, logits = At(logits), routing = At(routing)](CpuOps& cpu) {
    cpu.Route(logits, own, routing);
  });
}
void SimOps::CombineExperts(const ConstMatrix& x, const RouterParams& router,
                            const Routing& routing, bool accumulate, const Matrix& y) {
  Queue([=, x = At(x), routing = At(routing), y = At(y)](CpuOps& cpu) {
    cpu.CombineExperts(x, router, routing, accumulate, y);
  });
}
void SimOps::ArgMax(const ConstMatrix& x, int32_t* index) {
  Queue([x = At(x), index = At(index)](CpuOps& cpu) { cpu.ArgMax(x, index); });
}

SimDevice::SimDevice(CpuDevice::Parts parts)
    : parts_(std::move(parts)),
      host_(parts_),
      memory_(std::make_unique<SimMemory>(parts_.allocator)),
      ops_(std::make_unique<SimOps>(parts_, *memory_)) {}

std::unique_ptr<Sampler> SimDevice::MakeSampler(int64_t vocab_size) const {
  return std::make_unique<SimSampler>(host_.MakeSampler(vocab_size), *ops_, *memory_);
}

KvPool SimDevice::At(KvPool pool) const {
  pool.data = memory_->Reach(pool.data);
  return pool;
}

void SimDevice::CopyBlock(const KvPool& pool, int32_t from, int32_t to) {
  ops_->Defer([=, this, pool = At(pool)] { host_.CopyBlock(pool, from, to); });
}
void SimDevice::BlockToHost(const KvPool& pool, int32_t block, void* host) {
  ops_->Defer([=, this, pool = At(pool)] { host_.BlockToHost(pool, block, host); });
}
void SimDevice::BlockFromHost(const void* host, const KvPool& pool, int32_t block) {
  ops_->Finish();
  host_.BlockFromHost(host, At(pool), block);
}

bool TestsUseSim() {
  const char* const device = std::getenv("ALLSPARK_TEST_DEVICE");
  return device != nullptr && std::string_view(device) == "sim";
}

std::shared_ptr<Device> MakeTestDevice(CpuDevice::Parts parts) {
  if (TestsUseSim()) return std::make_shared<SimDevice>(std::move(parts));
  return std::make_shared<CpuDevice>(std::move(parts));
}

}  // namespace allspark::testing
