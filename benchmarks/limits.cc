// Measures the machine's limits, as one JSON object on stdout: read bandwidth (GB/s), float32
// multiply-adds (GFLOP/s), and, where the CPU has the instructions, bfloat16 dot products (GFLOP/s)
// and int8 dot products (GOP/s), of vectors or tiles, with 1, 2, 4, ... threads. A rate the CPU has
// no instruction for is null.
//
// usage: limits [MAX_THREADS [MIB [MIN_THREADS]]]
// Build: c++ -std=c++17 -O3 -march=native -pthread limits.cc -o limits

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kFloats = kVectorBytes / 4;
using Vector = float __attribute__((vector_size(kVectorBytes)));
using IntVector = int32_t __attribute__((vector_size(kVectorBytes)));

constexpr int kChains = 12;  // Independent sums: enough to cover latency 4-6 on two ports.
// Many short passes; the best one counts: on a shared machine, some of them run undisturbed.
constexpr int kMinPasses = 7;
constexpr double kMinSeconds = 0.5;

std::atomic<int64_t> sink{0};

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Runs work(thread_id) on every thread at once, several times; returns the shortest time from the
// common start to the last end.
double BestSeconds(int num_threads, const std::function<void(int)>& work) {
  double best = 1e30;
  const double first = Seconds();
  for (int pass = 0; pass < kMinPasses || Seconds() - first < kMinSeconds; ++pass) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> threads;
    for (int id = 0; id < num_threads; ++id) {
      threads.emplace_back([&, id] {
        ready.fetch_add(1);
        while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
        work(id);
      });
    }
    while (ready.load() < num_threads) std::this_thread::yield();
    const double begin = Seconds();
    go.store(true, std::memory_order_release);
    for (std::thread& thread : threads) thread.join();
    best = std::min(best, Seconds() - begin);
  }
  return best;
}

// Reads this thread's share. Integer sums: the compiler must not reorder float ones, and these
// have no denormals.
void ReadAll(const char* data, size_t bytes) {
  const auto* vectors = reinterpret_cast<const IntVector*>(data);
  const size_t count = bytes / sizeof(IntVector);
  IntVector sums[8] = {};
  for (size_t i = 0; i + 8 <= count; i += 8) {
    __builtin_prefetch(reinterpret_cast<const char*>(vectors + i) + 4096);
    if (kVectorBytes < 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(vectors + i) + 4096 + 4 * kVectorBytes);
    }
    for (size_t k = 0; k < 8; ++k) sums[k] += vectors[i + k];
  }
  int64_t total = 0;
  for (const IntVector& sum : sums) total += sum[0] + sum[1];
  sink += total;
}

template <typename V, typename Step>
void Chains(int64_t iterations, V start, Step step) {
  V sums[kChains];
  for (V& sum : sums) sum = start;
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) sums[k] = step(sums[k]);
  }
  char bytes[sizeof(V)];
  for (const V& sum : sums) {
    std::memcpy(bytes, &sum, sizeof(V));
    sink += bytes[0];
  }
}

constexpr int64_t kIterations = 4'000'000;

void FmaFloat32(int) {
  Vector factor = {}, addend = {};
  factor += 0.5f;
  addend += 1e-3f;
  // Hides the values from the compiler, which could otherwise fold the whole loop.
  asm volatile("" : "+m"(factor), "+m"(addend));
  Chains(kIterations, addend, [factor, addend](Vector x) { return x * factor + addend; });
}

#if defined(__AVX512BF16__)
constexpr bool kHasBf16 = true;
void DotBf16(int) {
  const __m512i raw = _mm512_set1_epi32(0x3c003c00);
  __m512bh a, b;
  std::memcpy(&a, &raw, sizeof(a));
  std::memcpy(&b, &raw, sizeof(b));
  Chains(kIterations, _mm512_set1_ps(1.0f), [a, b](__m512 x) { return _mm512_dpbf16_ps(x, a, b); });
}
constexpr double kBf16Ops = 64;
#else
constexpr bool kHasBf16 = false;
void DotBf16(int) {}
constexpr double kBf16Ops = 0;
#endif

#if defined(__AVX512VNNI__)
constexpr bool kHasInt8 = true;
void DotInt8(int) {
  const __m512i a = _mm512_set1_epi32(0x01020304), b = _mm512_set1_epi32(0x01010101);
  Chains(kIterations, _mm512_set1_epi32(1),
         [a, b](__m512i x) { return _mm512_dpbusd_epi32(x, a, b); });
}
constexpr double kInt8Ops = 128;
#elif defined(__AVXVNNI__)
constexpr bool kHasInt8 = true;
void DotInt8(int) {
  const __m256i a = _mm256_set1_epi32(0x01020304), b = _mm256_set1_epi32(0x01010101);
  Chains(kIterations, _mm256_set1_epi32(1),
         [a, b](__m256i x) { return _mm256_dpbusd_avx_epi32(x, a, b); });
}
constexpr double kInt8Ops = 64;
#elif defined(__AVX512BW__)
// Without an instruction for byte dot products, bytes are widened to 16 bits and their products
// added in pairs.
constexpr bool kHasInt8 = true;
void DotInt8(int) {
  const __m512i b = _mm512_set1_epi32(0x00010001);
  Chains(kIterations, _mm512_set1_epi32(1), [b](__m512i x) {
    x = _mm512_madd_epi16(x, b);
    asm("" : "+v"(x));
    return x;
  });
}
constexpr double kInt8Ops = 64;
#elif defined(__AVX2__)
constexpr bool kHasInt8 = true;
void DotInt8(int) {
  const __m256i b = _mm256_set1_epi32(0x00010001);
  Chains(kIterations, _mm256_set1_epi32(1), [b](__m256i x) {
    x = _mm256_madd_epi16(x, b);
    asm("" : "+x"(x));  // Keeps the sums in registers; without this GCC stores them in every round.
    return x;
  });
}
constexpr double kInt8Ops = 32;
#else
constexpr bool kHasInt8 = false;
void DotInt8(int) {}
constexpr double kInt8Ops = 0;
#endif

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
constexpr int kTileShare = 32;  // one tile product counts as this many vector products
constexpr double kTileBf16Ops = 2.0 * 16 * 16 * 32 / kTileShare;

// A process must ask the system for the tiles' state (ARCH_REQ_XCOMP_PERM).
bool HaveTiles() {
  static const bool have = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return have;
}

template <bool kBytes>
void DotTiles(int) {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static const Config config;
  _tile_loadconfig(&config);
  for (int64_t i = 0; i < kChains * kIterations / kTileShare; i += 4) {
    if constexpr (kBytes) {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_release();
}
#else
constexpr double kTileBf16Ops = 0;
bool HaveTiles() { return false; }
template <bool kBytes>
void DotTiles(int) {}
#endif

double Rate(int num_threads, double ops_per_vector, void (*work)(int)) {
  const double ops = ops_per_vector * kChains * static_cast<double>(kIterations) * num_threads;
  return ops / BestSeconds(num_threads, work) * 1e-9;
}

double ReadRate(int num_threads, const char* data, size_t bytes) {
  const size_t share = bytes / static_cast<size_t>(num_threads) / 512 * 512;
  const double seconds = BestSeconds(
      num_threads, [=](int id) { ReadAll(data + share * static_cast<size_t>(id), share); });
  return static_cast<double>(share) * num_threads / seconds * 1e-9;
}

std::string Number(bool present, double value) { return present ? std::to_string(value) : "null"; }

}  // namespace

int main(int argc, char** argv) {
  const int max_threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const int mib = argc > 2 ? std::atoi(argv[2]) : 1024;
  const int min_threads = argc > 3 ? std::atoi(argv[3]) : 1;
  if (max_threads < 1 || max_threads > 1024 || mib < 1 || mib > 65536 || min_threads < 1) {
    std::fprintf(stderr, "usage: limits [MAX_THREADS 1..1024 [MIB 1..65536 [MIN_THREADS]]]\n");
    return 2;
  }
  const size_t bytes = static_cast<size_t>(mib) << 20;
  const std::unique_ptr<char, void (*)(void*)> data(
      static_cast<char*>(std::aligned_alloc(4096, bytes)), std::free);
  if (data == nullptr) {
    std::fprintf(stderr, "limits: no %d MiB of memory\n", mib);
    return 1;
  }
  std::memset(data.get(), 1, bytes);
  std::vector<int> counts;
  for (int n = min_threads; n < max_threads; n *= 2) counts.push_back(n);
  counts.push_back(max_threads);
  std::printf("{\"vector_bytes\": %d, \"threads\": [", kVectorBytes);
  for (size_t i = 0; i < counts.size(); ++i) {
    const int n = counts[i];
    double bf16 = kHasBf16 ? Rate(n, kBf16Ops, DotBf16) : 0;
    double int8 = kHasInt8 ? Rate(n, kInt8Ops, DotInt8) : 0;
    if (HaveTiles()) {
      bf16 = std::max(bf16, Rate(n, kTileBf16Ops, DotTiles<false>));
      int8 = std::max(int8, Rate(n, 2 * kTileBf16Ops, DotTiles<true>));
    }
    std::printf(
        "%s{\"threads\": %d, \"read_gb_s\": %f, \"fma_gflop_s\": %f, \"bf16_gflop_s\": %s, "
        "\"int8_gop_s\": %s}",
        i == 0 ? "" : ", ", n, ReadRate(n, data.get(), bytes), Rate(n, 2 * kFloats, FmaFloat32),
        Number(kHasBf16, bf16).c_str(), Number(kHasInt8, int8).c_str());
  }
  std::printf("]}\n");
  return 0;
}
