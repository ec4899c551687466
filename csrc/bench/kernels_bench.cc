// Kernels of every table that this processor can run, on one thread, and the limits to compare them
// with: the read bandwidth for GEMM with one row, the rate of fused multiply-adds for GEMM with
// many rows. Rates are counters: "bytes_per_second" counts weights read, "flops" FLOP per second.
#include <benchmark/benchmark.h>

#include <array>
#include <cstdint>
#include <new>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/kernel_table.h"

namespace allspark::kernels {
namespace {

template <class T>
constexpr int kSlotOf =
    static_cast<int>(std::is_same_v<T, float> ? DType::kFloat32 : DType::kBFloat16);

void Set(float* p, float x) { *p = x; }
void Set(BFloat16* p, float x) { *p = ToBFloat16(x); }

// Operands begin at a page, as in the engine. Elsewhere every second load of a vector would touch
// two cache lines.
template <class T>
struct PageAllocator {
  using value_type = T;
  static constexpr std::align_val_t kPage{4096};

  PageAllocator() = default;
  template <class U>
  explicit PageAllocator(const PageAllocator<U>&) {}

  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kPage)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kPage); }
  bool operator==(const PageAllocator&) const { return true; }
};
template <class T>
using Vector = std::vector<T, PageAllocator<T>>;

template <class T>
Vector<T> Random(int64_t n) {
  Vector<T> x(static_cast<size_t>(n));
  uint32_t state = 1;
  for (T& e : x) {
    state = state * 1664525u + 1013904223u;
    Set(&e, static_cast<float>(state >> 8) * 0x1p-24f - 0.5f);
  }
  return x;
}

void SetFlops(benchmark::State& state, double per_iteration) {
  state.counters["flops"] =
      benchmark::Counter(per_iteration, benchmark::Counter::kIsIterationInvariantRate);
}

// The limit of decoding: reading memory once, in order.
void BM_ReadBandwidth(benchmark::State& state) {
  const Vector<uint64_t> memory(size_t{256} << 17, 1);  // 256 MiB
  for (auto _ : state) {
    uint64_t sums[8] = {};
    for (size_t i = 0; i < memory.size(); i += 8) {
      for (size_t j = 0; j < 8; ++j) sums[j] += memory[i + j];
    }
    benchmark::DoNotOptimize(sums);
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * memory.size() * 8));
}
BENCHMARK(BM_ReadBandwidth);

#if defined(__x86_64__)
// The limit of prefill on AVX2: independent fused multiply-adds in registers.
__attribute__((target("avx2,fma"))) void FmaLoop(float* out) {
  __m256 acc[10];
  for (auto& a : acc) a = _mm256_set1_ps(1.0f);
  const __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);
  for (int i = 0; i < 1000; ++i) {
    for (auto& a : acc) a = _mm256_fmadd_ps(a, x, y);
  }
  for (const auto& a : acc) _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), a));
}
void BM_FmaRateAvx2(benchmark::State& state) {
  if (FindTable("avx2") == nullptr) return state.SkipWithError("no AVX2");
  float out[8] = {};
  for (auto _ : state) {
    FmaLoop(out);
    benchmark::DoNotOptimize(out);
  }
  SetFlops(state, 1000.0 * 10 * 8 * 2);
}
BENCHMARK(BM_FmaRateAvx2);
#endif

template <class T>
void Gemm(benchmark::State& state, const KernelTable* table) {
  const int64_t m = state.range(0), n = state.range(1), k = state.range(2);
  const Vector<T> a = Random<T>(m * k), w = Random<T>(n * k);
  Vector<float> c(static_cast<size_t>(m * n));
  GemmArgs args = {};
  args.a = a.data();
  args.lda = k;
  args.w = w.data();
  args.c = c.data();
  args.ldc = n;
  args.m = m;
  args.n = n;
  args.k = k;
  args.panel_end = n / kPanelColumns;
  for (auto _ : state) {
    table->gemm[kSlotOf<T>][kSlotOf<T>](args);
    benchmark::ClobberMemory();
  }
  SetFlops(state, 2.0 * static_cast<double>(m * n * k));
  state.SetBytesProcessed(state.iterations() * n * k * static_cast<int64_t>(sizeof(T)));
}

// What the weights of other makers' formats have besides 4 bits and scales.
enum Part : int64_t { kNone, kOffset, kHigh, kHighAndOffset, kTable };

// Weights quantised to `bits` bits, with one scale per `group` (0: per column). int8 activations
// have one for every `scales` (0: per row).
template <DType kAct>
void GemmQuantized(benchmark::State& state, const KernelTable* table) {
  const int64_t m = state.range(0), n = state.range(1), k = state.range(2), bits = state.range(3);
  const int64_t group_size = state.range(4) == 0 ? k : state.range(4);
  const Vector<float> w = Random<float>(n * k * bits / 32), a = Random<float>(m * k);
  const Vector<BFloat16> scale = Random<BFloat16>(n * k / group_size);
  const int64_t scale_group = state.range(5);
  const Vector<float> a_scale = Random<float>(m * RowScales(k, scale_group));
  const Vector<int32_t> sums(static_cast<size_t>(m * RowSums(k)), 1);
  const int64_t part = state.range(6);
  const bool has_high = part == kHigh || part == kHighAndOffset;
  const bool has_offset = part == kOffset || part == kHighAndOffset;
  const Vector<BFloat16> offset = Random<BFloat16>(has_offset ? n * k / group_size : 0);
  const Vector<float> high = Random<float>(has_high ? n * k / 16 : 0);
  const Vector<int8_t> numbers(16, 1);
  Vector<float> c(static_cast<size_t>(m * n));
  GemmArgs args = {};
  args.a = a.data();
  args.lda = k;
  args.w = w.data();
  args.c = c.data();
  args.ldc = n;
  args.m = m;
  args.n = n;
  args.k = k;
  args.panel_end = n / kPanelColumns;
  args.scales.scale = scale.data();
  args.scales.group_size = group_size;
  if (has_offset) args.scales.offset = offset.data();
  if (has_high) args.scales.high = reinterpret_cast<const unsigned char*>(high.data());
  if (part == kTable) args.scales.table = numbers.data();
  if (kAct == DType::kInt8) {
    args.a_scale = a_scale.data();
    args.a_scale_group = scale_group;
    args.a_sums = sums.data();
  }
  const DType weight = bits == 8 ? DType::kUInt8 : DType::kUInt4;
  for (auto _ : state) {
    table->gemm[static_cast<int>(weight)][static_cast<int>(kAct)](args);
    benchmark::ClobberMemory();
  }
  SetFlops(state, 2.0 * static_cast<double>(m * n * k));
  const int64_t group_bytes = has_offset ? 4 : 2;
  const int64_t high_bytes = has_high ? n * k / 4 : 0;
  state.SetBytesProcessed(state.iterations() *
                          (n * k * bits / 8 + high_bytes + n * k / group_size * group_bytes));
}

void Quantize(benchmark::State& state, const KernelTable* table) {
  const int64_t cols = state.range(0);
  const Vector<float> x = Random<float>(cols);
  Vector<int8_t> q(static_cast<size_t>(cols));
  Vector<int32_t> sums(static_cast<size_t>(RowSums(cols)));
  const int64_t group = state.range(1);
  Vector<float> scale(static_cast<size_t>(RowScales(cols, group)));
  for (auto _ : state) {
    table->quantize({x.data(), cols, q.data(), cols, scale.data(), sums.data(), 1, cols, group});
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * cols);
}

void RmsNorm(benchmark::State& state, const KernelTable* table) {
  const int64_t cols = state.range(0);
  const Vector<float> x = Random<float>(cols), weight = Random<float>(cols);
  Vector<BFloat16> y(x.size());
  for (auto _ : state) {
    table->rms_norm[kSlotOf<BFloat16>]({x.data(), 0, weight.data(), y.data(), 0, 1, cols, 1e-5f});
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * cols);
}

void GatedSilu(benchmark::State& state, const KernelTable* table) {
  const int64_t cols = state.range(0);
  const Vector<float> x = Random<float>(2 * cols);
  Vector<BFloat16> out(static_cast<size_t>(cols));
  for (auto _ : state) {
    table->gated_act[kSlotOf<BFloat16>]({x.data(), 0, out.data(), 0, 1, cols, Activation::kSilu});
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * cols);
}

void ArgMax(benchmark::State& state, const KernelTable* table) {
  const Vector<float> x = Random<float>(state.range(0));
  int32_t index;
  for (auto _ : state) {
    table->argmax({x.data(), 0, 1, state.range(0), &index});
    benchmark::DoNotOptimize(index);
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void SumExp(benchmark::State& state, const KernelTable* table) {
  const Vector<float> x = Random<float>(state.range(0));
  float highest;
  double sum;
  for (auto _ : state) {
    table->sum_exp({x.data(), 0, 1, state.range(0), &highest, &sum});
    benchmark::DoNotOptimize(sum);
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

using Bench = void (*)(benchmark::State&, const KernelTable*);

benchmark::internal::Benchmark* Register(const char* op, Bench bench, const KernelTable* table) {
  const std::string name = std::string(op) + "/" + table->name;
  return benchmark::RegisterBenchmark(name.c_str(), bench, table);
}

void RegisterTable(const KernelTable* table) {
  for (const auto& [name, bench] : {std::pair<const char*, Bench>{"GemmFloat32", Gemm<float>},
                                    {"GemmBFloat16", Gemm<BFloat16>}}) {
    // 64 MiB and more of weights, beyond the caches.
    Register(name, bench, table)
        ->ArgNames({"m", "n", "k"})
        ->Args({1, 16384, 2048})
        ->Args({4, 16384, 2048})
        ->Args({32, 16384, 2048})
        ->Args({32, 38912, 896});
    auto* many = Register(name, bench, table)->ArgNames({"m", "n", "k"});
    for (int64_t m : {16, 64, 256, 1024}) many->Args({m, 2048, 2048});
    // A prompt's chunk through the matrices of a 0.5B model.
    many->Args({512, 9728, 896})->Args({512, 896, 4864})->Args({512, 1152, 896});
  }
  for (const auto& [name, bench] :
       {std::pair<const char*, Bench>{"GemmInt8", GemmQuantized<DType::kInt8>},
        {"GemmWidened", GemmQuantized<DType::kBFloat16>}}) {
    auto* all =
        Register(name, bench, table)->ArgNames({"m", "n", "k", "bits", "group", "scales", "part"});
    for (const auto& [bits, group, scales, part] : {std::array<int64_t, 4>{8, 0, 0, kNone},
                                                    {8, 64, 0, kNone},
                                                    {4, 64, 0, kNone},
                                                    {4, 32, 0, kNone},
                                                    {8, 0, 64, kNone},
                                                    {8, 0, 128, kNone},
                                                    {4, 64, 64, kNone},
                                                    {4, 32, 64, kNone},
                                                    {4, 32, 64, kOffset},
                                                    {4, 16, 64, kHigh},
                                                    {4, 16, 64, kHighAndOffset},
                                                    {4, 32, 64, kTable}}) {
      // Of float activations, scales make no difference.
      if (scales > 0 && part == kNone && bench != &GemmQuantized<DType::kInt8>) continue;
      for (int64_t m : {1, 4, 32}) all->Args({m, 65536, 2048, bits, group, scales, part});
      for (int64_t m : {16, 64, 1024}) all->Args({m, 2048, 2048, bits, group, scales, part});
      all->Args({512, 9728, 896, bits, group, scales, part});
      all->Args({512, 896, 4864, bits, group, scales, part});
    }
  }
  Register("RmsNorm", RmsNorm, table)->Arg(2048);
  Register("GatedSilu", GatedSilu, table)->Arg(5632);
  Register("Quantize", Quantize, table)
      ->ArgNames({"cols", "scales"})
      ->Args({4864, 0})
      ->Args({4864, 64});
  Register("ArgMax", ArgMax, table)->Arg(151936);
  Register("SumExp", SumExp, table)->Arg(151936);
}

// The reference is an oracle, not a kernel to measure.
const bool registered = [] {
  for (const KernelTable* table : AvailableTables()) {
    if (table != FindTable("reference")) RegisterTable(table);
  }
  return true;
}();

}  // namespace
}  // namespace allspark::kernels
