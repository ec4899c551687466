// The paged cache and attention: every table against softmax in double over plain arrays, and the
// independence of a token's result from tiles, splits, block sizes and the content of unused
// memory.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string_view>
#include <type_traits>
#include <vector>

#include "cpp/kernels/kernel_test_util.h"
#include "kernels/attention_scratch.h"

namespace allspark::kernels {
namespace {

using testing::StoreBound;

// Caches that hold integers.
struct Int8 {};
struct UInt4 {};
struct Int8UInt4 {};  // keys, values
template <class T>
constexpr bool kIsQuantized =
    std::is_same_v<T, Int8> || std::is_same_v<T, UInt4> || std::is_same_v<T, Int8UInt4>;
template <class T>
constexpr DType kCacheDType = std::is_same_v<T, Int8>        ? DType::kInt8
                              : std::is_same_v<T, UInt4>     ? DType::kUInt4
                              : std::is_same_v<T, Int8UInt4> ? DType::kInt8UInt4
                                                             : kDTypeOf<T>;
template <class T>
constexpr int kCacheSlot = static_cast<int>(kCacheDType<T>);
// The result type of attention over a cache of T.
template <class T>
using OutOf = std::conditional_t<kIsQuantized<T>, float, T>;

struct Sizes {
  int64_t head_dim = 64, group = 2, kv_heads = 2, block_size = 16;
  int64_t num_tokens = 0;  // in the sequence
  int64_t window = 0;
  float soft_cap = 0;
  bool alibi = false;
  int64_t q_heads() const { return group * kv_heads; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
};

std::ostream& operator<<(std::ostream& os, const Sizes& s) {
  return os << "head_dim=" << s.head_dim << " group=" << s.group << " block_size=" << s.block_size
            << " num_tokens=" << s.num_tokens << " window=" << s.window
            << " soft_cap=" << s.soft_cap << " alibi=" << s.alibi;
}

// Queries, keys and values of one sequence.
struct Sequence {
  Sizes sizes;
  std::vector<float> q, k, v;
  std::vector<float> slopes;  // of query heads

  Sequence(const Sizes& s, uint32_t seed) : sizes(s) {
    for (int64_t h = 0; h < s.q_heads(); ++h) slopes.push_back(0.7f / static_cast<float>(1 + h));
    Data data(seed);
    q = data.Vector<float>(s.num_tokens * s.q_heads() * s.head_dim, 1.5f);
    k = data.Vector<float>(s.num_tokens * s.kv_heads * s.head_dim);
    v = data.Vector<float>(s.num_tokens * s.kv_heads * s.head_dim);
  }
};

// A pool of blocks in random order; all memory is NaN until written. It has two layers and uses the
// second, so that offsets matter.
template <class T>
class Cache {
 public:
  Cache(const Sizes& sizes, int64_t num_tokens, uint32_t seed) : sizes_(sizes) {
    const int64_t blocks = (num_tokens + sizes.block_size - 1) / sizes.block_size;
    const auto side = [&](DType dtype) {
      const int64_t bytes = KvPartBytes(dtype, sizes.block_size, sizes.head_dim);
      return PagedKv::Side{0, bytes, kExtentBlocks * bytes};
    };
    PagedKv::Side k = side(KeyDType(kCacheDType<T>)), v = side(ValueDType(kCacheDType<T>));
    layer_stride_ = sizes.kv_heads * (k.head_stride + v.head_stride);
    v.offset = sizes.kv_heads * k.head_stride;
    k.offset += layer_stride_;
    v.offset += layer_stride_;
    extent_stride_ = 2 * layer_stride_ + 64;
    memory_.assign(static_cast<size_t>((blocks / kExtentBlocks + 1) * extent_stride_), 0xff);
    table_.resize(static_cast<size_t>(blocks));
    std::iota(table_.begin(), table_.end(), 1);
    std::shuffle(table_.begin(), table_.end(), std::mt19937(seed));
    kv_ = {memory_.data(), kExtentBlocks, extent_stride_, sizes.block_size, k, v};
  }

  void Write(const KernelTable& table, const Sequence& s, int64_t begin, int64_t end) {
    const int64_t ld = sizes_.kv_heads * sizes_.head_dim;
    table.kv_write[kCacheSlot<T>]({kv_, table_.data(), s.k.data() + begin * ld,
                                   s.v.data() + begin * ld, ld, end - begin, begin, sizes_.kv_heads,
                                   sizes_.head_dim});
  }
  const PagedKv& kv() const { return kv_; }
  const int32_t* table() const { return table_.data(); }
  const std::vector<unsigned char>& memory() const { return memory_; }
  // Fills a block with NaN, as if the pool had given it to another sequence.
  void ForgetBlock(int64_t index) {
    const int64_t block = table_[static_cast<size_t>(index)];
    for (const PagedKv::Side& side : {kv_.k, kv_.v}) {
      for (int64_t head = 0; head < sizes_.kv_heads; ++head) {
        for (const int64_t layer : {-layer_stride_, int64_t{0}}) {
          std::fill_n(kv_.PartAt(block, side, head) + layer, side.block_stride, 0xff);
        }
      }
    }
  }

 private:
  static constexpr int64_t kExtentBlocks = 4;

  Sizes sizes_;
  int64_t layer_stride_, extent_stride_;
  std::vector<unsigned char> memory_;
  std::vector<int32_t> table_;
  PagedKv kv_;
};

// Attention of KV head 0 for tokens [begin, end) of the sequence, in a chunk that starts at
// chunk_begin; out and scratch are still to be set.
template <class T>
AttentionArgs CallArgs(const Sequence& s, const Cache<T>& cache, int64_t chunk_begin, int64_t begin,
                       int64_t end) {
  const Sizes& z = s.sizes;
  const int64_t ld = z.q_heads() * z.head_dim;
  AttentionArgs args = {};
  args.kv = cache.kv();
  args.block_table = cache.table();
  args.q = s.q.data() + chunk_begin * ld;
  args.ldq = ld;
  args.ldo = ld;
  args.begin_position = chunk_begin;
  args.token_begin = begin - chunk_begin;
  args.token_end = end - chunk_begin;
  args.group = z.group;
  args.head_dim = z.head_dim;
  args.scale = z.scale();
  args.window = z.window;
  args.soft_cap = z.soft_cap;
  args.slopes = z.alibi ? s.slopes.data() : nullptr;
  return args;
}

// Attention of tokens [begin, end) of the sequence, in calls of at most `split` tokens, as a chunk
// that starts at chunk_begin. out: [num_tokens, q_heads, head_dim]; other tokens stay unchanged.
template <class T, class Out>
void Attend(const KernelTable& table, const Sequence& s, const Cache<T>& cache, int64_t chunk_begin,
            int64_t begin, int64_t end, int64_t split, std::vector<Out>* out) {
  const Sizes& z = s.sizes;
  const int64_t ld = z.q_heads() * z.head_dim;
  std::vector<float> scratch(static_cast<size_t>(AttentionScratchFloats(z.head_dim)) + 2, 3e38f);
  const float guard = 12345.0f;
  scratch.back() = guard;
  for (int64_t h = 0; h < z.kv_heads; ++h) {
    for (int64_t t = begin; t < end; t += split) {
      AttentionArgs args = CallArgs(s, cache, chunk_begin, t, std::min(end, t + split));
      args.out = out->data() + chunk_begin * ld;
      args.kv_head = h;
      args.scratch = scratch.data() + 1;
      table.attention[kCacheSlot<T>][kSlotOf<Out>](args);
    }
  }
  EXPECT_EQ(scratch.back(), guard) << "wrote beyond the scratch memory";
}

// Replaces one token's head x by the values that a quantised cache would return, with the
// arithmetic of PagedKv.
inline void RoundToCache(float* x, int64_t n, bool uint4) {
  float low = 0, high = 0;
  for (int64_t i = 0; i < n; ++i) low = std::min(low, x[i]), high = std::max(high, x[i]);
  const float range = uint4 ? high - low : std::max(high, -low), steps = uint4 ? 15.0f : 127.0f;
  const float scale = range / steps, inverse = steps / range;
  const float zero = uint4 ? std::nearbyintf(-low * inverse) : 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float u = std::nearbyintf(x[i] * inverse) + zero;
    const float stored = uint4 ? std::clamp(u, 0.0f, 15.0f) : u;
    // Half a step, plus the clipping that rounding the zero point may cause.
    ASSERT_NEAR((stored - zero) * scale, x[i], scale * (uint4 ? 1.001f : 0.501f));
    x[i] = (stored - zero) * scale;
  }
}
// Replaces keys or values by those that the cache holds.
template <class T>
void RoundToCache(const Sizes& z, bool keys, std::vector<float>* x) {
  const DType dtype = keys ? KeyDType(kCacheDType<T>) : ValueDType(kCacheDType<T>);
  for (size_t i = 0; i < x->size(); i += static_cast<size_t>(z.head_dim)) {
    if constexpr (kIsQuantized<T>) {
      RoundToCache(x->data() + i, z.head_dim, dtype == DType::kUInt4);
    } else {
      for (size_t d = i; d < i + static_cast<size_t>(z.head_dim); ++d) {
        T stored;
        Set(&stored, (*x)[d]);
        (*x)[d] = Value(stored);
      }
    }
  }
}

// The format that queries and weights are rounded to.
enum class Products { kFloat, kBf16, kInteger };

// One output row in double and its error bound, for a sequence as the cache holds it. quick:
// weights come from the quick exponential (relative error 3e-6), which the rounding to bfloat16
// covers.
struct Expected {
  std::vector<double> out, bound;

  Expected(const Sequence& s, int64_t token, int64_t q_head, Products products, bool quick,
           bool bf16_out) {
    const Sizes& z = s.sizes;
    const int64_t kv_head = q_head / z.group;
    const float* q = s.q.data() + (token * z.q_heads() + q_head) * z.head_dim;
    const int64_t begin = z.window > 0 ? std::max<int64_t>(0, token - z.window + 1) : 0;
    std::vector<double> scores;
    double score_abs = 0, limit = 0, highest = -1e300, key_abs = 0, value_range = 0, q_most = 0;
    for (int64_t d = 0; d < z.head_dim; ++d) {
      q_most = std::max(q_most, std::fabs(static_cast<double>(q[d])));
    }
    for (int64_t p = begin; p <= token; ++p) {
      double dot = 0, dot_abs = 0, key_sum = 0, low = 0, high = 0;
      for (int64_t d = 0; d < z.head_dim; ++d) {
        const double term = static_cast<double>(q[d]) * At(s.k, z, p, kv_head, d);
        dot += term, dot_abs += std::fabs(term);
        key_sum += std::fabs(At(s.k, z, p, kv_head, d));
        low = std::min(low, At(s.v, z, p, kv_head, d));
        high = std::max(high, At(s.v, z, p, kv_head, d));
      }
      key_abs = std::max(key_abs, key_sum);
      value_range = std::max(value_range, high - low);
      const double scale = static_cast<double>(z.scale()), cap = static_cast<double>(z.soft_cap);
      const double slope = z.alibi ? static_cast<double>(s.slopes[static_cast<size_t>(q_head)]) : 0;
      const double bias = slope * static_cast<double>(p - token);
      const double score = (cap > 0 ? cap * std::tanh(dot * scale / cap) : dot * scale) + bias;
      scores.push_back(score);
      score_abs = std::max(score_abs, dot_abs * scale);
      limit = std::max({limit, std::fabs(score), cap});
      highest = std::max(highest, score);
    }
    double denominator = 0;
    for (double& x : scores) denominator += x = std::exp(x - highest);
    testing::AttentionRounding rounding;
    if (products == Products::kBf16) {
      rounding.score = testing::kBf16Roundoff * score_abs;
      rounding.weight = testing::kBf16Roundoff;
    } else if (products == Products::kInteger) {
      // Half a unit, plus the rounding of float scales. A query's unit is its largest element
      // divided by the largest integer (`most`). A weight is multiplied by its value's scale and
      // stored in 15 bits; its unit is the largest scale / 32767. No value times its scale exceeds
      // the range of values. Before the division by the denominator, the largest weight is 1.
      const double most = std::min<double>(
          32767, std::floor(2147483647.0 / (127.0 * static_cast<double>(z.head_dim))));
      rounding.score = 0.51 * q_most / most * key_abs * static_cast<double>(z.scale());
      rounding.value =
          0.51 / 32767 * value_range * static_cast<double>(token + 1 - begin) / denominator;
      rounding.weight = quick ? 4e-6 : 0;
    }
    for (int64_t d = 0; d < z.head_dim; ++d) {
      double sum = 0, sum_abs = 0;
      for (int64_t p = begin; p <= token; ++p) {
        const double term =
            scores[static_cast<size_t>(p - begin)] / denominator * At(s.v, z, p, kv_head, d);
        sum += term, sum_abs += std::fabs(term);
      }
      out.push_back(sum);
      const double f =
          testing::AttentionBound(z.head_dim, token + 1, score_abs, limit, sum_abs, rounding);
      bound.push_back(StoreBound(bf16_out, sum, f));
    }
  }

  static double At(const std::vector<float>& x, const Sizes& z, int64_t p, int64_t h, int64_t d) {
    return static_cast<double>(x[static_cast<size_t>((p * z.kv_heads + h) * z.head_dim + d)]);
  }
};

template <class T>
void ExpectCorrect(const KernelTable& table, const Sizes& sizes, uint32_t seed) {
  SCOPED_TRACE(::testing::Message() << table.name << " " << sizes << " cache=" << kCacheSlot<T>);
  const Sequence s(sizes, seed);
  Cache<T> cache(sizes, sizes.num_tokens, seed);
  cache.Write(table, s, 0, sizes.num_tokens);
  std::vector<OutOf<T>> out(s.q.size());
  Attend(table, s, cache, 0, 0, sizes.num_tokens, 16, &out);
  Sequence stored = s;
  RoundToCache<T>(sizes, /*keys=*/true, &stored.k);
  RoundToCache<T>(sizes, /*keys=*/false, &stored.v);
  const bool quick = HasBf16Products(table);
  const Products products = kIsQuantized<T>                      ? Products::kInteger
                            : !std::is_same_v<T, float> && quick ? Products::kBf16
                                                                 : Products::kFloat;
  // Every token near the start, the end and the chunk boundary, and some of the others.
  for (int64_t t = 0; t < sizes.num_tokens; ++t) {
    const bool near = t < 3 || t + 3 > sizes.num_tokens || std::abs(t - 256) < 3;
    if (!near && t % 37 != 0) continue;
    for (int64_t h = 0; h < sizes.q_heads(); ++h) {
      const Expected want(stored, t, h, products, quick, kIsBf16<OutOf<T>>);
      for (int64_t d = 0; d < sizes.head_dim; ++d) {
        const size_t at = static_cast<size_t>((t * sizes.q_heads() + h) * sizes.head_dim + d);
        const size_t i = static_cast<size_t>(d);
        ASSERT_NEAR(static_cast<double>(Value(out[at])), want.out[i], want.bound[i])
            << "token " << t << " head " << h << " element " << d;
      }
    }
  }
}

// Compares the result of [begin, num_tokens) in one call with token-by-token results from a cache
// without later tokens. In float32, so that rounding to bfloat16 hides nothing.
template <class T>
void ExpectTokensAlone(const KernelTable& table, const Sizes& sizes, int64_t begin, uint32_t seed) {
  SCOPED_TRACE(::testing::Message()
               << table.name << " " << sizes << " begin=" << begin << " cache=" << kCacheSlot<T>);
  const int64_t n = sizes.num_tokens;
  const Sequence s(sizes, seed);
  Cache<T> alone(sizes, n, seed);
  std::vector<float> want(s.q.size());
  alone.Write(table, s, 0, begin);
  for (int64_t t = begin; t < n; ++t) {
    alone.Write(table, s, t, t + 1);
    Attend(table, s, alone, t, t, t + 1, 1, &want);
  }
  const int64_t row = sizes.q_heads() * sizes.head_dim;
  for (int64_t block_size : {16, 32, 64, 128}) {
    Sizes other = sizes;
    other.block_size = block_size;
    Cache<T> cache(other, n, seed + 1);
    // In uneven pieces, so that some writes contain only half a pair.
    for (int64_t t = 0, step = 1; t < n; t += step, step = step % 7 + 2) {
      cache.Write(table, s, t, std::min(n, t + step));
    }
    const int64_t split = block_size == 16 ? n : block_size == 32 ? 1 : block_size == 64 ? 7 : 16;
    std::vector<float> got(s.q.size());
    Attend(table, s, cache, begin, begin, n, split, &got);
    for (int64_t t = begin; t < n; ++t) {
      ASSERT_TRUE(SameBits(got.data() + t * row, want.data() + t * row, row))
          << "token " << t << " block_size " << block_size << " calls of " << split;
    }
  }
}

using AttentionTest = KernelTest;

template <class T>
void TestSizes(const KernelTable& table) {
  uint32_t seed = 1;
  for (int64_t head_dim : {8, 32, 64, 80, 96, 128, 256}) {
    for (int64_t group : {1, 3, 8}) {
      Sizes sizes;
      sizes.head_dim = head_dim;
      sizes.group = group;
      sizes.kv_heads = 1 + seed % 2;
      sizes.block_size = 16 << (seed % 4);
      const int64_t lengths[] = {1, 17, 40, 259, 300};
      sizes.num_tokens = lengths[seed % 5];
      const int64_t windows[] = {0, 5, 100};
      sizes.window = windows[seed % 3];
      sizes.soft_cap = seed % 4 == 1 ? 2.5f : 0.0f;
      sizes.alibi = seed % 3 == 2;
      ExpectCorrect<T>(table, sizes, seed);
      ++seed;
    }
  }
}
TEST_P(AttentionTest, MatchesSoftmaxFloat32) { TestSizes<float>(table()); }
TEST_P(AttentionTest, MatchesSoftmaxBFloat16) { TestSizes<BFloat16>(table()); }
TEST_P(AttentionTest, MatchesSoftmaxInt8) { TestSizes<Int8>(table()); }
TEST_P(AttentionTest, MatchesSoftmaxUInt4) { TestSizes<UInt4>(table()); }
TEST_P(AttentionTest, MatchesSoftmaxInt8UInt4) { TestSizes<Int8UInt4>(table()); }

template <class T>
void ExpectSameBits(const KernelTable& table, const KernelTable& other) {
  uint32_t seed = 1;
  for (int64_t group : {1, 2, 3, 8}) {
    for (int64_t head_dim : {64, 80}) {
      Sizes sizes;
      sizes.head_dim = head_dim;
      sizes.group = group;
      sizes.num_tokens = 300;
      const Sequence s(sizes, seed);
      Cache<T> cache(sizes, sizes.num_tokens, seed++);
      cache.Write(table, s, 0, sizes.num_tokens);
      std::vector<float> got(s.q.size()), want(s.q.size());
      Attend(table, s, cache, 0, 0, sizes.num_tokens, sizes.num_tokens, &got);
      Attend(other, s, cache, 0, 0, sizes.num_tokens, sizes.num_tokens, &want);
      EXPECT_TRUE(SameBits(got.data(), want.data(), static_cast<int64_t>(got.size()))) << sizes;
    }
  }
}
// GEMM is in QuantizedTest.EveryInstructionSetGivesTheSameBitsForInt8Activations.
TEST(AvxVnniTest, AttentionHasTheBitsOfAvx2) {
  const auto& all = testing::AllTestTables();
  const auto table = std::ranges::find_if(
      all, [](const KernelTable* t) { return testing::IsOf(*t, "avx2_vnni"); });
  if (table == all.end()) {
    GTEST_SKIP() << "no SIMDe (libsimde-dev) at build time, a sanitizer build, or no AVX2";
  }
  ExpectSameBits<Int8>(**table, *FindTable("avx2"));
  ExpectSameBits<UInt4>(**table, *FindTable("avx2"));
  ExpectSameBits<Int8UInt4>(**table, *FindTable("avx2"));
}

TEST_P(AttentionTest, HeadDimsThatAreNoMultipleOfAVector) {
  for (int64_t head_dim : {2, 6, 20, 42, 72}) {
    Sizes sizes;
    sizes.head_dim = head_dim;
    sizes.num_tokens = 35;
    ExpectCorrect<float>(table(), sizes, 3);
    ExpectCorrect<BFloat16>(table(), sizes, 3);
    ExpectTokensAlone<BFloat16>(table(), sizes, 0, 3);
    ExpectCorrect<Int8>(table(), sizes, 3);
    ExpectCorrect<UInt4>(table(), sizes, 3);
    ExpectCorrect<Int8UInt4>(table(), sizes, 3);
    ExpectTokensAlone<UInt4>(table(), sizes, 0, 3);
  }
}

// Expects that tokens whose keys and values are all alike give their value, the first element of
// s.v. Attends for the last tokens, whose sums are the largest, on both sides of a chunk's border.
template <class T>
void ExpectCommonValue(const KernelTable& table, const Sequence& s) {
  const Sizes& sizes = s.sizes;
  Cache<T> cache(sizes, sizes.num_tokens, 1);
  cache.Write(table, s, 0, sizes.num_tokens);
  std::vector<OutOf<T>> out(s.q.size());
  const int64_t begin = kAttentionChunk - 2;
  Attend(table, s, cache, begin, begin, sizes.num_tokens, 16, &out);
  const double value = static_cast<double>(s.v[0]), size = std::fabs(value);
  const double score = std::fabs(static_cast<double>(s.q[0]) * static_cast<double>(s.k[0])) *
                       static_cast<double>(sizes.head_dim) * static_cast<double>(sizes.scale());
  // The error of a dot product is the same for all keys, and so changes no weight. As in Expected,
  // weights have 15 bits, and may come from the quick exponential.
  const testing::AttentionRounding rounding = {.weight = 4e-6, .value = 0.51 / 32767 * size};
  const double bound = testing::AttentionBound(sizes.head_dim, sizes.num_tokens, /*score_abs=*/0,
                                               score, size, rounding);
  const int64_t row = sizes.q_heads() * sizes.head_dim;
  for (size_t i = static_cast<size_t>(begin * row); i < out.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(Value(out[i])), value, bound) << sizes << " element " << i;
  }
}

// All elements have the largest magnitude: integer sums come close to 2^31.
template <class T>
void TestLargestSums(const KernelTable& table) {
  for (const int64_t head_dim : {64, 512, 576}) {
    Sizes sizes;
    sizes.head_dim = head_dim;
    sizes.num_tokens = 270;
    sizes.group = 3;
    Sequence s(sizes, 1);
    std::fill(s.q.begin(), s.q.end(), 1.5f);
    for (const float sign : {1.0f, -1.0f}) {
      for (std::vector<float>* x : {&s.k, &s.v}) std::fill(x->begin(), x->end(), 1.5f * sign);
      ExpectCommonValue<T>(table, s);
    }
  }
}
TEST_P(AttentionTest, LargestSumsFitInt8) { TestLargestSums<Int8>(table()); }
TEST_P(AttentionTest, LargestSumsFitUInt4) { TestLargestSums<UInt4>(table()); }
TEST_P(AttentionTest, LargestSumsFitInt8UInt4) { TestLargestSums<Int8UInt4>(table()); }

// Scores so large that rounding may make a weight's exponent positive.
template <class T>
void TestLargeScores(const KernelTable& table) {
  for (const float size : {37.3f, 40.0f, 43.7f, 47.1f, 51.3f, 58.9f, 66.6f, 71.7f}) {
    Sizes sizes;
    sizes.head_dim = 64;
    sizes.num_tokens = 260;
    Sequence s(sizes, 1);
    for (std::vector<float>* x : {&s.q, &s.k}) std::fill(x->begin(), x->end(), size);
    std::fill(s.v.begin(), s.v.end(), 1.5f);
    ExpectCommonValue<T>(table, s);
  }
}
TEST_P(AttentionTest, LargeScoresInt8) { TestLargeScores<Int8>(table()); }
TEST_P(AttentionTest, LargeScoresUInt4) { TestLargeScores<UInt4>(table()); }
TEST_P(AttentionTest, LargeScoresInt8UInt4) { TestLargeScores<Int8UInt4>(table()); }

template <class T>
void TestTokensAlone(const KernelTable& table) {
  if (&table == &Reference()) GTEST_SKIP() << "has no tiles";
  uint32_t seed = 1;
  for (int64_t group = 1; group <= 8; ++group) {
    for (int64_t window : {0, 1, 2, 30, 255, 256, 257}) {
      Sizes sizes;
      const int64_t dims[] = {8, 32, 64, 80, 96, 128, 256};
      sizes.head_dim = dims[seed % 7];
      sizes.group = group;
      sizes.kv_heads = 1;
      sizes.window = window;
      sizes.soft_cap = seed % 5 == 0 ? 3.0f : 0.0f;
      sizes.alibi = seed % 3 == 2;
      // Around the boundaries of chunks, and from the start.
      const int64_t begins[] = {0, 239, 250, 505};
      const int64_t begin = begins[seed % 4];
      sizes.num_tokens = begin + 28;
      sizes.block_size = 16 << (seed % 4);
      ExpectTokensAlone<T>(table, sizes, begin, seed);
      ++seed;
    }
  }
}
TEST_P(AttentionTest, ATokenDependsOnNoTileFloat32) { TestTokensAlone<float>(table()); }
TEST_P(AttentionTest, ATokenDependsOnNoTileBFloat16) { TestTokensAlone<BFloat16>(table()); }
TEST_P(AttentionTest, ATokenDependsOnNoTileInt8) { TestTokensAlone<Int8>(table()); }
TEST_P(AttentionTest, ATokenDependsOnNoTileUInt4) { TestTokensAlone<UInt4>(table()); }
TEST_P(AttentionTest, ATokenDependsOnNoTileInt8UInt4) { TestTokensAlone<Int8UInt4>(table()); }

// Chunks computed in separate calls and merged, against one call.
template <class T>
void TestPartials(const KernelTable& table) {
  if (table.attention_merge[kSlotOf<float>] == nullptr) GTEST_SKIP() << "has no partial results";
  for (const auto& [head_dim, group, window] :
       {std::array<int64_t, 3>{64, 7, 0}, {80, 1, 0}, {8, 70, 0}, {64, 4, 600}, {1040, 2, 0}}) {
    Sizes sizes;
    sizes.head_dim = head_dim;
    sizes.group = group;
    sizes.kv_heads = 1;
    sizes.num_tokens = 700;
    sizes.window = window;
    sizes.alibi = group % 2 == 0;
    const Sequence s(sizes, 11);
    Cache<T> cache(sizes, sizes.num_tokens, 11);
    cache.Write(table, s, 0, sizes.num_tokens);
    const int64_t last = sizes.num_tokens - 1, row = group * head_dim;
    std::vector<float> want(s.q.size());
    Attend(table, s, cache, last, last, last + 1, 1, &want);
    const int64_t first_chunk = (window > 0 ? last + 1 - window : 0) / kAttentionChunk;
    const int64_t num_chunks = last / kAttentionChunk + 1 - first_chunk;
    const int64_t size = AttentionPartialFloats(head_dim) * group;
    std::vector<float> partials(static_cast<size_t>(num_chunks * size), kNan);
    std::vector<float> scratch(static_cast<size_t>(AttentionScratchFloats(head_dim)));
    AttentionArgs args = CallArgs(s, cache, last, last, last + 1);
    args.scratch = scratch.data();
    for (int64_t chunk = 0, step = 1; chunk < num_chunks; chunk += step, step = 2) {
      args.chunk_begin = first_chunk + chunk;
      args.chunk_end = std::min(first_chunk + chunk + step, first_chunk + num_chunks);
      args.partials = partials.data() + chunk * size;
      table.attention[kCacheSlot<T>][kSlotOf<float>](args);
    }
    std::vector<float> got(static_cast<size_t>(row));
    for (int64_t r = 0; r < group; r += 3) {
      table.attention_merge[kSlotOf<float>](
          {partials.data(), num_chunks, group, head_dim, r, std::min(r + 3, group), got.data()});
    }
    EXPECT_TRUE(SameBits(got.data(), want.data() + last * row, row)) << sizes;
  }
}
TEST_P(AttentionTest, PartialResultsMergeToTheSameBitsFloat32) { TestPartials<float>(table()); }
TEST_P(AttentionTest, PartialResultsMergeToTheSameBitsBFloat16) { TestPartials<BFloat16>(table()); }
TEST_P(AttentionTest, PartialResultsMergeToTheSameBitsInt8) { TestPartials<Int8>(table()); }
TEST_P(AttentionTest, PartialResultsMergeToTheSameBitsUInt4) { TestPartials<UInt4>(table()); }
TEST_P(AttentionTest, PartialResultsMergeToTheSameBitsInt8UInt4) {
  TestPartials<Int8UInt4>(table());
}

// A NaN or infinity in a later token's key or value must not reach an earlier token of the same
// tile.
template <class T>
void TestLaterNan(const KernelTable& table) {
  Sizes sizes;
  sizes.num_tokens = 21;
  Sequence s(sizes, 5);
  Cache<T> clean(sizes, 21, 5);
  clean.Write(table, s, 0, 21);
  std::vector<OutOf<T>> want(s.q.size()), got(s.q.size());
  Attend(table, s, clean, 0, 0, 21, 21, &want);
  const int64_t bad = 11, row = sizes.kv_heads * sizes.head_dim;
  for (int64_t i = 0; i < row; ++i) {
    s.k[static_cast<size_t>(bad * row + i)] = kInf;
    s.v[static_cast<size_t>(bad * row + i)] = kNan;
  }
  Cache<T> poisoned(sizes, 21, 5);
  poisoned.Write(table, s, 0, 21);
  Attend(table, s, poisoned, 0, 0, 21, 21, &got);
  const int64_t out_row = sizes.q_heads() * sizes.head_dim;
  EXPECT_TRUE(SameBits(got.data(), want.data(), bad * out_row)) << table.name;
  EXPECT_TRUE(std::isnan(Value(got[static_cast<size_t>(bad * out_row)]))) << table.name;
}
TEST_P(AttentionTest, ALaterTokensNanStaysThereFloat32) { TestLaterNan<float>(table()); }
TEST_P(AttentionTest, ALaterTokensNanStaysThereBFloat16) { TestLaterNan<BFloat16>(table()); }
TEST_P(AttentionTest, ALaterTokensNanStaysThereInt8) { TestLaterNan<Int8>(table()); }
TEST_P(AttentionTest, ALaterTokensNanStaysThereUInt4) { TestLaterNan<UInt4>(table()); }
TEST_P(AttentionTest, ALaterTokensNanStaysThereInt8UInt4) { TestLaterNan<Int8UInt4>(table()); }

TEST_P(AttentionTest, BlocksBeforeTheWindowAreNotRead) {
  Sizes sizes;
  sizes.num_tokens = 400;
  sizes.window = 33;
  const Sequence s(sizes, 6);
  Cache<BFloat16> cache(sizes, 400, 6);
  cache.Write(table(), s, 0, 400);
  std::vector<BFloat16> want(s.q.size()), got(s.q.size());
  Attend(table(), s, cache, 390, 390, 400, 10, &want);
  for (int64_t block = 0; block < (390 - 32) / 16; ++block) cache.ForgetBlock(block);
  Attend(table(), s, cache, 390, 390, 400, 10, &got);
  EXPECT_TRUE(SameBits(got.data(), want.data(), static_cast<int64_t>(got.size())));
}

TEST_P(AttentionTest, ScoresFarApartNeitherOverflowNorVanish) {
  Sizes sizes;
  sizes.num_tokens = 300;
  sizes.group = 1;
  sizes.kv_heads = 1;
  Sequence s(sizes, 7);
  for (float& x : s.q) x *= 40.0f;  // scores of hundreds
  Cache<float> cache(sizes, 300, 7);
  cache.Write(table(), s, 0, 300);
  std::vector<float> out(s.q.size());
  Attend(table(), s, cache, 0, 0, 300, 16, &out);
  for (float x : out) ASSERT_TRUE(std::isfinite(x));
}

// A chunk whose scores are all minus infinity must not spoil the others.
TEST_P(AttentionTest, AChunkWithoutWeightIsHarmless) {
  Sizes sizes;
  sizes.num_tokens = 300;
  sizes.group = 1;
  sizes.kv_heads = 1;
  sizes.head_dim = 8;
  Sequence s(sizes, 8);
  for (float& x : s.q) x = 1.0f;
  for (int64_t p = 0; p < 300; ++p) {
    for (int64_t d = 0; d < 8; ++d) {
      s.k[static_cast<size_t>(p * 8 + d)] = p < 256 ? -kInf : 0.0f;
      s.v[static_cast<size_t>(p * 8 + d)] = p < 256 ? 100.0f : 2.0f;
    }
  }
  Cache<float> cache(sizes, 300, 8);
  cache.Write(table(), s, 0, 300);
  std::vector<float> out(s.q.size());
  Attend(table(), s, cache, 299, 299, 300, 1, &out);
  for (int64_t d = 0; d < 8; ++d) EXPECT_EQ(out[static_cast<size_t>(299 * 8 + d)], 2.0f);
}

// Every table writes the same bytes, and no bytes of other tokens.
template <class T>
void TestKvWrite(const KernelTable& table) {
  for (int64_t head_dim : {2, 6, 8, 34, 64, 80}) {
    for (int64_t block_size : {16, 64}) {
      Sizes sizes;
      sizes.head_dim = head_dim;
      sizes.block_size = block_size;
      sizes.num_tokens = 77;
      const Sequence s(sizes, 9);
      Cache<T> want(sizes, 77, 9), got(sizes, 77, 9);
      const int64_t cuts[] = {0, 1, 2, 5, 16, 31, 47, 63, 76};
      for (size_t i = 0; i + 1 < std::size(cuts); ++i) {
        got.Write(table, s, cuts[i], cuts[i + 1]);
        want.Write(Reference(), s, cuts[i], cuts[i + 1]);
      }
      ASSERT_EQ(got.memory(), want.memory()) << table.name << " " << sizes;
    }
  }
}
TEST_P(AttentionTest, KvWriteFloat32) { TestKvWrite<float>(table()); }
TEST_P(AttentionTest, KvWriteBFloat16) { TestKvWrite<BFloat16>(table()); }
TEST_P(AttentionTest, KvWriteInt8) { TestKvWrite<Int8>(table()); }
TEST_P(AttentionTest, KvWriteUInt4) { TestKvWrite<UInt4>(table()); }
TEST_P(AttentionTest, KvWriteInt8UInt4) { TestKvWrite<Int8UInt4>(table()); }

AS_INSTANTIATE_KERNEL_TEST(AttentionTest);

}  // namespace
}  // namespace allspark::kernels
