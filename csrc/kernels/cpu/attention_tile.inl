// The register tiles of attention, and the functions that turn scores into weights. As in tile.inl,
// every element is one chain over its reduced dimension, ascending, whatever the tile's size. But
// the second operand is in pieces of 16 tokens, wherever the cache holds them.
#pragma once

#include "kernels/attention_scratch.h"
#include "kernels/cpu/math.inl"
#include "kernels/cpu/tile.inl"

namespace allspark::kernels {
namespace {

constexpr float kNoScore = -__builtin_huge_valf();
constexpr float kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static_assert(kLanes <= 16);

// Tokens that are always in the same block, whatever the block size.
constexpr int64_t kGranule = kLeastBlockSize;
constexpr int64_t kSpan = kAttentionSpan;
constexpr int64_t kSpanGranules = kSpan / kGranule;
static_assert(kGranule % kLanes == 0);

// The keys or values of one KV head at kSpan positions. Granules outside the requested positions
// point to the nearest requested granule, so that whole tiles may be read.
struct Span {
  const unsigned char* granule[kSpanGranules];
  int64_t stride;  // bytes from one group of the reduced dimension to the next
  // 4-bit elements only: the zero points as 16-bit integers. Keys have each one twice, [kSpan][2];
  // values have [kSpan].
  const unsigned char* zeros;

  // Values only: all columns of the group with this index.
  template <int64_t kGroup>
  __attribute__((always_inline)) inline const unsigned char* Group(int64_t group) const {
    constexpr int64_t kGroups = kGranule / kGroup;
    return granule[group / kGroups] + group % kGroups * stride;
  }
};

// Reads a vector of lanes that need no widening. StoredLanes (cache_quantized.inl) reads and widens
// lanes as a quantised cache stores them.
struct WideLanes {
  static constexpr int64_t kBytes = kLaneBytes;  // of a lane

  // Zero points of the keys from `token` on, and of a group of values.
  static AS_ALWAYS_INLINE VecI KeyZeros(const Span&, int64_t) { return Set1Int(0); }
  static AS_ALWAYS_INLINE VecI ValueZeros(const Span&, int64_t) { return Set1Int(0); }
  static AS_ALWAYS_INLINE VecI Load(const unsigned char* p, VecI) { return LoadI(p); }
  static AS_ALWAYS_INLINE VecI LoadMasked(Mask mask, const unsigned char* p, VecI) {
    return MaskLoadI(mask, p);
  }
};

// Rows of an attention tile when there are many. With 16 registers it is one row less than in GEMM,
// whose tile uses all registers. An attention tile keeps more values, and with as many rows the
// compiler spilled accumulators (12 % slower on AVX2).
constexpr int64_t kUsualTileRows = kRegisters == 32 ? kTileRows : 5;
// The last tile may have this many rows: one more where registers allow it. A decode with 7 query
// heads per KV head then passes over the cache once.
constexpr int64_t kMostTileRows = kLanes == 16 ? 7 : kUsualTileRows;

// How rows are divided into tiles.
template <class Dot>
struct AttentionTileShape {
  static constexpr int64_t kMostRows = kMostTileRows;
  // The rows of the next tile when `left` remain.
  static AS_ALWAYS_INLINE int64_t NextRows(int64_t left) {
    return left <= kMostTileRows ? left : EvenShare(left, kUsualTileRows);
  }
};

// Pairs of 16-bit integers, summed exactly in int32. Accumulators hold the bits of the sums.
struct DotInteger {
  using A = int16_t;
  static constexpr int64_t kGroup = 2;

  template <int R, int V, class Load>
  static AS_ALWAYS_INLINE void Step(VecF (&acc)[R][V], const int16_t* a, int64_t lda, Load load) {
    VecI b[V];
    AS_UNROLL for (int v = 0; v < V; ++v) b[v] = load(v);
    AS_UNROLL for (int r = 0; r < R; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, a + r * lda, 4);
      const VecI x = Set1Int(pair);
      AS_UNROLL for (int v = 0; v < V; ++v) {
#if defined(AS_KERNELS_NATIVE_VNNI)
        acc[r][v] = AsFloat(AddDotPairs16(AsInt(acc[r][v]), x, b[v]));
#else
        acc[r][v] = AsFloat(AddInt(AsInt(acc[r][v]), DotPairs16(x, b[v])));
#endif
      }
    }
  }
};

// What tiles fetch into the cache while they compute. Each granule of the span stands for an equal
// share of its block's keys or values. All granules of a block together cover them, whatever the
// order within the block.
struct Ahead {
  const unsigned char* granule[kSpanGranules];
  int64_t step;  // bytes per vector of keys (or values) that a tile reads from the granule
};

// The granules that the tile of rows [begin, end), out of `rows`, fetches: one bit each. The first
// two tiles over a span share the granules, so that memory is busy most of the time.
template <class Dot>
static AS_ALWAYS_INLINE uint32_t AheadGranules(int64_t begin, int64_t end, int64_t rows) {
  constexpr uint32_t kAll = (1u << kSpanGranules) - 1, kEven = kAll / 3;
  if (begin == 0) return end == rows ? kAll : kEven;
  return begin <= AttentionTileShape<Dot>::kMostRows ? kAll - kEven : 0;
}

// scores = q . k.
template <class A>
struct ScoreTileArgs {
  const A* a;  // queries
  int64_t lda;
  const Span* keys;
  const Ahead* ahead;  // the same positions' values
  uint32_t fetched;    // which granules of `ahead`: one bit each
  int64_t groups;      // of head_dim
  float* c;            // of the span's first position
  int64_t ldc;
  int64_t begin, end;  // positions within the span
};

template <class Dot, class Lanes, int R, int V>
void ScoreTile(const ScoreTileArgs<typename Dot::A>& args, int64_t first) {
  constexpr int kGranules = static_cast<int>(V * kLanes / kGranule);
  VecF acc[R][V];
  const unsigned char* b[V];
  AS_UNROLL for (int v = 0; v < V; ++v) {
    const int64_t token = first + v * kLanes;
    b[v] = args.keys->granule[token / kGranule] + token % kGranule * Lanes::kBytes;
  }
  const uint32_t fetched = args.fetched >> (first / kGranule) & ((1u << kGranules) - 1);
  const int64_t ahead_step = args.ahead->step;
  AS_UNROLL for (int r = 0; r < R; ++r) {
    AS_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = Zero();
  }
  const typename Dot::A* a = args.a;
  const int64_t lda = args.lda, stride = args.keys->stride;
  int64_t offset = 0;
  const auto step = [&]() __attribute__((always_inline)) {
    Dot::template Step<R, V>(
        acc, a, lda, [&b, &args, first, offset ](int v) __attribute__((always_inline)) {
          return Lanes::Load(b[v] + offset, Lanes::KeyZeros(*args.keys, first + v * kLanes));
        });
    a += Dot::kGroup;
    offset += stride;
  };
  int64_t g = 0;
  // Most tiles fetch nothing, and a test at each step took a twentieth of their time.
  if (fetched != 0) {
    // Every granule or every second one (AheadGranules), one after the other: memory is read
    // fastest in this order.
    const unsigned char* ahead[kGranules] = {};
    int count = 0;
    for (int i = 0; i < kGranules; ++i) {
      if ((fetched >> i & 1) != 0) ahead[count++] = args.ahead->granule[first / kGranule + i];
    }
    const auto fetching_steps = [&]<int kLines>() __attribute__((always_inline)) {
      for (int i = 0; i < kLines; ++i) {
        const unsigned char* at = ahead[i];
        for (const int64_t end = args.groups * (i + 1) / kLines; g < end; ++g) {
          AS_UNROLL for (int line = 0; line < kLines; ++line)
              PrefetchStream(at + line * ahead_step);
          at += kLines * ahead_step;
          step();
        }
      }
    };
    if (count == kGranules) {
      fetching_steps.template operator()<kGranules>();
    } else {
      fetching_steps.template operator()<kGranules == 1 ? 1 : kGranules / 2>();
    }
  }
  for (; g < args.groups; ++g) step();
  AS_UNROLL for (int r = 0; r < R; ++r) {
    AS_UNROLL for (int v = 0; v < V; ++v) {
      StoreF(args.c + r * args.ldc + first + v * kLanes, acc[r][v]);
    }
  }
}

// The vectors of keys in a tile of R rows: as in GEMM, but whole granules.
constexpr int ScoreVecs(int rows) {
  return TileVecs(rows) * kLanes < kGranule ? static_cast<int>(kGranule / kLanes) : TileVecs(rows);
}

template <class Dot, class Lanes, int R>
static AS_ALWAYS_INLINE void ScoreTiles(const ScoreTileArgs<typename Dot::A>& args) {
  constexpr int64_t kColumns = ScoreVecs(R) * kLanes;
  static_assert(kSpan % kColumns == 0);
  for (int64_t i = args.begin / kColumns * kColumns; i < args.end; i += kColumns) {
    ScoreTile<Dot, Lanes, R, ScoreVecs(R)>(args, i);
  }
}

// sum += weights . v for whole groups of tokens.
template <class A>
struct ValueTileArgs {
  const A* a;  // weights, of the span's first position
  int64_t lda;
  const Span* values;
  int64_t group_lines;             // cache lines of a group, at kLaneBytes a lane
  const Ahead* ahead;              // the next chunk's keys
  uint32_t fetched;                // which granules of `ahead`: one bit each
  int64_t group_begin, group_end;  // within the span
  float* c;                        // sums
  int64_t ldc;
};

// V vectors of columns from `column` on. kMasked: V is 1, and only the columns in `mask` exist.
template <class Dot, class Lanes, int R, int V, bool kMasked>
void ValueTile(const ValueTileArgs<typename Dot::A>& args, int64_t column, Mask mask) {
  constexpr int64_t kGroups = kGranule / Dot::kGroup;
  VecF acc[R][V];
  float* c = args.c + column;
  AS_UNROLL for (int r = 0; r < R; ++r) {
    AS_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = LoadF(c + r * args.ldc + v * kLanes);
  }
  const int64_t stride = args.values->stride, lda = args.lda;
  const typename Dot::A* a = args.a + args.group_begin * Dot::kGroup;
  for (int64_t group = args.group_begin; group < args.group_end;) {
    const int64_t granule = group / kGroups;
    const int64_t end = Lower((granule + 1) * kGroups, args.group_end);
    const unsigned char* b =
        args.values->granule[granule] + group % kGroups * stride + column * Lanes::kBytes;
    const int64_t ahead_step = args.ahead->step;
    const unsigned char* ahead =
        args.ahead->granule[granule] +
        (group % kGroups * args.group_lines + column * kLaneBytes / 64) * ahead_step;
    const bool fetched = (args.fetched >> granule & 1) != 0;
    for (; group < end; ++group) {
      AS_UNROLL for (int64_t line = 0; line < V * kVecBytes; line += 64) {
        if (fetched) PrefetchStream(ahead + line / 64 * ahead_step);
      }
      ahead += args.group_lines * ahead_step;
      const VecI zeros = Lanes::ValueZeros(*args.values, group);
      Dot::template Step<R, V>(
          acc, a, lda, [ b, mask, zeros ](int v) __attribute__((always_inline)) {
            return kMasked ? Lanes::LoadMasked(mask, b, zeros)
                           : Lanes::Load(b + v * kLanes * Lanes::kBytes, zeros);
          });
      a += Dot::kGroup;
      b += stride;
    }
  }
  AS_UNROLL for (int r = 0; r < R; ++r) {
    AS_UNROLL for (int v = 0; v < V; ++v) StoreF(c + r * args.ldc + v * kLanes, acc[r][v]);
  }
}

// All columns: in tiles of V vectors, then of half as many, and so on down to one. A masked tile
// takes the rest.
template <class Dot, class Lanes, int R, int V>
static AS_ALWAYS_INLINE void ValueTiles(const ValueTileArgs<typename Dot::A>& args, int64_t column,
                                        int64_t columns) {
  for (; columns - column >= V * kLanes; column += V * kLanes) {
    ValueTile<Dot, Lanes, R, V, false>(args, column, FirstLanes(kLanes));
  }
  if constexpr (V > 1) {
    ValueTiles<Dot, Lanes, R, V / 2>(args, column, columns);
  } else if (column < columns) {
    ValueTile<Dot, Lanes, R, 1, true>(args, column, FirstLanes(columns - column));
  }
}

// 1 to kMostTileRows rows.
template <class Dot, class Lanes>
void ScoreRows(int64_t rows, const ScoreTileArgs<typename Dot::A>& args) {
  WithRows<kMostTileRows>(rows, [&args]<int R>() { ScoreTiles<Dot, Lanes, R>(args); });
}
template <class Dot, class Lanes>
void ValueRows(int64_t rows, const ValueTileArgs<typename Dot::A>& args, int64_t columns) {
  WithRows<kMostTileRows>(rows, [&args, columns]<int R>() {
    ValueTiles<Dot, Lanes, R, TileVecs(R)>(args, 0, columns);
  });
}

// How queries and weights are stored.
static AS_ALWAYS_INLINE void StoreQuery(float* p, VecF x) { StoreF(p, x); }
static AS_ALWAYS_INLINE void StoreWeights(int16_t* p, VecF x) { StoreInt16(p, RoundToInt(x)); }
static AS_ALWAYS_INLINE void StoreWeights(int16_t* p, VecF first, VecF second) {
  StoreWeights(p, first);
  StoreWeights(p + kLanes, second);
}
static AS_ALWAYS_INLINE void StoreWeights(float* p, VecF x) { StoreF(p, x); }
static AS_ALWAYS_INLINE void StoreWeights(float* p, VecF first, VecF second) {
  StoreF(p, first);
  StoreF(p + kLanes, second);
}

// e^(scale * score - highest) = Weight(score, Factor(scale), Shift(highest)).
template <class A>
struct WeightFunction {
  static AS_ALWAYS_INLINE VecF Factor(float scale) { return Set1(scale); }
  static AS_ALWAYS_INLINE VecF Shift(float highest) { return Set1(-highest); }
  static AS_ALWAYS_INLINE VecF Weight(VecF score, VecF factor, VecF shift) {
    return Exp(Fma(score, factor, shift));
  }
};

#if defined(AS_VEC_HAS_FRACTION)
// With products of 16 bits, attention's time goes into the exponential. So this one is 2^x, by a
// polynomial of degree 4 and a scaling by a power of 2, within 3e-6. That is a thousandth of a
// bfloat16 weight's rounding error, and a fifth of a 15-bit weight's.
struct QuickWeightFunction {
  static constexpr float kLog2E = 1.44269504f;
  static AS_ALWAYS_INLINE VecF Factor(float scale) { return Mul(Set1(scale), Set1(kLog2E)); }
  static AS_ALWAYS_INLINE VecF Shift(float highest) {
    return Neg(Mul(Set1(highest), Set1(kLog2E)));
  }
  static AS_ALWAYS_INLINE VecF Weight(VecF score, VecF factor, VecF shift) {
    const VecF x = Fma(score, factor, shift);
    const VecF f = Fraction(x);
    VecF p = Set1(0.0134266717f);
    p = Fma(p, f, Set1(0.0522424953f));
    p = Fma(p, f, Set1(0.2412801868f));
    p = Fma(p, f, Set1(0.6930448537f));
    p = Fma(p, f, Set1(1.0f));
    return ScaleByPowerOf2(p, x);
  }
};
template <>
struct WeightFunction<int16_t> : QuickWeightFunction {};
#endif

#if defined(AS_KERNELS_NATIVE_BF16)
static AS_ALWAYS_INLINE void StoreQuery(uint16_t* p, VecF x) { StoreBf16(p, x); }
// Subnormal weights may become zero, which does not matter here.
static AS_ALWAYS_INLINE void StoreWeights(uint16_t* p, VecF x) { StoreBf16Quickly(p, x); }
static AS_ALWAYS_INLINE void StoreWeights(uint16_t* p, VecF first, VecF second) {
  StoreBf16Quickly(p, first, second);
}
template <>
struct WeightFunction<uint16_t> : QuickWeightFunction {};
#endif

// Stores a query where tiles read it. Returns the factor of its scores.
template <class A>
static AS_ALWAYS_INLINE float PlaceQuery(const float* q, int64_t head_dim, A* to) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    StoreQuery(to + d, MaskLoadF(FirstLanes(head_dim - d), q + d));
  }
  return 1.0f;
}
// In 15 bits, or in fewer if the sum of head_dim products with a byte would not fit in 31 bits. A
// query with a NaN or an infinity becomes zeros, with the factor NaN.
static AS_ALWAYS_INLINE float PlaceQuery(const float* q, int64_t head_dim, int16_t* to) {
  const int64_t fitting = 0x7fffffff / (127 * head_dim);
  const float most = static_cast<float>(Lower(fitting, 32767));
  const float range = HighestMagnitude(q, head_dim);
  const bool poisoned = range != range, tiny = range < kQuantizeTiny;
  const VecF inverse = Set1(poisoned || tiny ? 0.0f : most / range);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const VecF x = MaskLoadF(FirstLanes(head_dim - d), q + d);
    StoreInt16(to + d, RoundToInt(poisoned ? Zero() : Mul(x, inverse)));
  }
  return poisoned ? __builtin_nanf("") : tiny ? 0.0f : range / most;
}

}  // namespace
}  // namespace allspark::kernels
