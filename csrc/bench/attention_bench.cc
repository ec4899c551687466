// Paged attention on all cores, as a layer of a model runs it, and the limits to compare it with:
// the read bandwidth for decoding; for prefill the rate of bfloat16 dot products, or of float32
// multiply-adds where the table has no dot product. Rates are counters: "bytes_per_second" counts
// cache that must be read once, "flops" FLOP per second.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/int_math.h"
#include "kernels/kernel_table.h"
#include "memory/bfc_allocator.h"
#include "ops/attention.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/kv_layout.h"
#include "ops/kv_write.h"

namespace allspark {
namespace {

ThreadPool& Pool() {
  static ThreadPool pool(0);
  return pool;
}

std::vector<float> Random(int64_t n) {
  std::vector<float> x(static_cast<size_t>(n));
  uint32_t state = 1;
  for (float& e : x) {
    state = state * 1664525u + 1013904223u;
    e = static_cast<float>(state >> 8) * 0x1p-24f - 0.5f;
  }
  return x;
}

void SetFlops(benchmark::State& state, double per_iteration) {
  state.counters["flops"] =
      benchmark::Counter(per_iteration, benchmark::Counter::kIsIterationInvariantRate);
}

void BM_ReadBandwidth(benchmark::State& state) {
  const std::vector<uint64_t> memory(size_t{256} << 17, 1);  // 256 MiB
  for (auto _ : state) {
    Pool().ParallelFor(static_cast<int64_t>(memory.size()) / 8, 1,
                       [&](int64_t begin, int64_t end, int) {
                         uint64_t sums[8] = {};
                         for (int64_t i = begin; i < end; ++i) {
                           for (size_t j = 0; j < 8; ++j) {
                             sums[j] += memory[static_cast<size_t>(i) * 8 + j];
                           }
                         }
                         benchmark::DoNotOptimize(sums);
                       });
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * memory.size() * 8));
}
BENCHMARK(BM_ReadBandwidth)->UseRealTime();

#if defined(__x86_64__)
constexpr int kChains = 24;  // Independent accumulators: more than latency times rate.

__attribute__((target("avx512f,avx512bf16"))) void Bf16DotLoop(float* out) {
  __m512 acc[kChains];
  for (auto& a : acc) a = _mm512_set1_ps(1.0f);
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f003f00);
  const __m512bh y = (__m512bh)_mm512_set1_epi32(0x3c003c00);
  for (int i = 0; i < 100000; ++i) {
    for (auto& a : acc) a = _mm512_dpbf16_ps(a, x, y);
  }
  __m512 sum = _mm512_setzero_ps();
  for (const auto& a : acc) sum = _mm512_add_ps(sum, a);
  _mm512_storeu_ps(out, sum);
}

void BM_Bf16DotRate(benchmark::State& state) {
  if (kernels::FindTable("avx512_bf16") == nullptr) return state.SkipWithError("no AVX512_BF16");
  const int64_t threads = Pool().num_threads();
  for (auto _ : state) {
    Pool().ParallelFor(threads, 1, [](int64_t, int64_t, int) {
      float out[16];
      Bf16DotLoop(out);
      benchmark::DoNotOptimize(out);
    });
  }
  SetFlops(state, static_cast<double>(threads) * 100000.0 * kChains * 64);
}
BENCHMARK(BM_Bf16DotRate)->UseRealTime();
#endif

// A cache with enough layers that the next layer is not in the processor's caches, and `batch`
// sequences of one length, of which the last `tokens` tokens attend.
struct Case {
  AttentionParams params;
  int64_t tokens, context, batch;
  DType cache, out;
};

class Layers {
 public:
  Layers(const OpContext& context, const Case& c) {
    const int64_t block_size = 32;
    const int64_t blocks = c.batch * CeilDiv(c.context, block_size);
    KvShape shape{c.cache, 1, c.params.kv_heads, c.params.head_dim, block_size};
    layer_bytes_ = cpu::KvBlockBytes(shape);
    shape.num_layers = std::clamp<int64_t>((int64_t{256} << 20) / (blocks * layer_bytes_), 1, 24);
    // The engine's allocator, which uses huge pages.
    allocator_ = std::move(*CreateCpuBfcAllocator({}, int64_t{2} << 30));
    memory_ = std::move(
        *Buffer::Create(allocator_.get(), static_cast<size_t>(blocks * cpu::KvBlockBytes(shape))));
    pool_ = {shape, static_cast<unsigned char*>(memory_.data()), blocks};
    for (int32_t i = 0; i < blocks; ++i) table_.push_back(i);
    const int64_t cols = c.params.kv_heads * c.params.head_dim;
    std::vector<float> x = Random(c.context * cols);
    const Matrix rows{x.data(), DType::kFloat32, c.context, cols, cols};
    for (int64_t s = 0; s < c.batch; ++s) {
      const int32_t* table = table_.data() + s * CeilDiv(c.context, block_size);
      const SequenceRange whole{0, c.context, 0, table};
      for (int64_t layer = 0; layer < num(); ++layer) {
        KvWrite(context, At(layer), {{&whole, 1}, &whole}, rows, rows);
      }
      sequences_.push_back({s * c.tokens, c.tokens, c.context - c.tokens, table});
    }
  }

  KvLayer At(int64_t layer) const { return {pool_, layer}; }
  int64_t num() const { return pool_.shape.num_layers; }
  int64_t layer_bytes() const { return layer_bytes_; }
  int64_t num_blocks() const { return static_cast<int64_t>(table_.size()); }
  SequenceRanges sequences() const { return {sequences_, sequences_.data()}; }

 private:
  std::unique_ptr<Allocator> allocator_;
  Buffer memory_;
  std::vector<int32_t> table_;
  std::vector<SequenceRange> sequences_;
  KvPool pool_;
  int64_t layer_bytes_;  // of one block
};

void Run(benchmark::State& state, const kernels::KernelTable* table, DType cache, DType out_dtype) {
  Case c{{state.range(0), state.range(1), 64, 0.125f, 0, 0.0f},
         state.range(2),
         state.range(3),
         state.range(4),
         cache,
         out_dtype};
  CpuOps ops(*table, Pool());
  const OpContext context{&ops};
  const Layers layers(context, c);
  const int64_t rows = c.batch * c.tokens, cols = c.params.q_heads * c.params.head_dim;
  std::vector<float> q = Random(rows * cols), out(q.size());
  std::vector<float> scratch(static_cast<size_t>(ops.AttentionScratch(c.params)));
  int64_t layer = 0;
  for (auto _ : state) {
    PagedAttention(context, c.params, layers.At(layer), layers.sequences(),
                   {q.data(), DType::kFloat32, rows, cols, cols}, scratch.data(),
                   {out.data(), out_dtype, rows, cols, cols});
    benchmark::ClobberMemory();
    layer = (layer + 1) % layers.num();
  }
  const double keys = static_cast<double>(c.context) - static_cast<double>(c.tokens - 1) / 2;
  SetFlops(state, 4.0 * keys * static_cast<double>(rows * cols));
  state.SetBytesProcessed(state.iterations() * layers.num_blocks() * layers.layer_bytes());
}

// Writing the keys and values of one sequence's chunk.
void RunWrite(benchmark::State& state, const kernels::KernelTable* table, DType cache) {
  const int64_t tokens = state.range(0), kv_heads = 8;
  const Case c{{kv_heads, kv_heads, 64, 0.125f, 0, 0.0f}, tokens, 8192, 1, cache, cache};
  CpuOps ops(*table, Pool());
  const OpContext context{&ops};
  const Layers layers(context, c);
  std::vector<float> x = Random(tokens * kv_heads * 64);
  const Matrix rows{x.data(), DType::kFloat32, tokens, kv_heads * 64, kv_heads * 64};
  for (auto _ : state) {
    KvWrite(context, layers.At(0), layers.sequences(), rows, rows);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * 2 * tokens * kv_heads * 64);
}

void Register(const kernels::KernelTable* table, const char* name, DType cache, DType out) {
  const std::string write = std::string("KvWrite") + name + "/" + table->name;
  benchmark::RegisterBenchmark(write.c_str(),
                               [=](benchmark::State& state) { RunWrite(state, table, cache); })
      ->ArgName("tokens")
      ->Arg(512)
      ->Arg(1)
      ->UseRealTime();
  const std::string full = std::string("Attention") + name + "/" + table->name;
  auto* bench = benchmark::RegisterBenchmark(
      full.c_str(), [=](benchmark::State& state) { Run(state, table, cache, out); });
  bench->ArgNames({"q_heads", "kv_heads", "tokens", "context", "batch"})->UseRealTime();
  for (const auto& [q_heads, kv_heads] : {std::pair{14, 2}, {32, 8}}) {
    bench->Args({q_heads, kv_heads, 512, 1024, 1});
    bench->Args({q_heads, kv_heads, 512, 8192, 1});
    bench->Args({q_heads, kv_heads, 1, 8192, 1});
    bench->Args({q_heads, kv_heads, 1, 2048, 16});
    bench->Args({q_heads, kv_heads, 1, 256, 32});
  }
  bench->Args({8, 8, 512, 1024, 1});
  bench->Args({3, 1, 1, 8192, 1});
}

// The reference is an oracle, not a kernel to measure.
const bool registered = [] {
  for (const kernels::KernelTable* table : kernels::AvailableTables()) {
    if (table == kernels::FindTable("reference")) continue;
    Register(table, "Float32", DType::kFloat32, DType::kFloat32);
    Register(table, "BFloat16", DType::kBFloat16, DType::kBFloat16);
    Register(table, "Int8", DType::kInt8, DType::kBFloat16);
    Register(table, "UInt4", DType::kUInt4, DType::kBFloat16);
    Register(table, "Int8UInt4", DType::kInt8UInt4, DType::kBFloat16);
  }
  return true;
}();

}  // namespace
}  // namespace allspark
