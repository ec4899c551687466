// The register tile under GEMM: rows of A times columns of a matrix B. B is stored in 32-bit lanes
// (one float, or a pair of bfloat16 or float16 along K); the lanes of one k group are contiguous.
// Attention's tiles use the same dot products.
//
// Every element of C is one chain of fused multiply-adds over k ascending, whatever the tile's
// size. A tile may stop at any k group and later continue from the sums that it stored, with the
// same bits.
#pragma once

// Include a vec_*.h before this file.

namespace allspark::kernels {
namespace {

#if defined(__clang__)
#define AS_UNROLL _Pragma("unroll")
#else
#define AS_UNROLL _Pragma("GCC unroll 16")
#endif

static AS_ALWAYS_INLINE void Prefetch(const void* p) { __builtin_prefetch(p); }
// The same into the second level only: for weights, keys and values, which come from memory. The
// first level can wait for few lines at once. On a Zen 4, eight rows that fetched into it while
// they multiplied took as long as fetching and multiplying in turn.
static AS_ALWAYS_INLINE void PrefetchStream(const void* p) { __builtin_prefetch(p, 0, 2); }

static AS_ALWAYS_INLINE constexpr int64_t Lower(int64_t a, int64_t b) { return a < b ? a : b; }
static AS_ALWAYS_INLINE constexpr int64_t Higher(int64_t a, int64_t b) { return a > b ? a : b; }
static AS_ALWAYS_INLINE constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
// The next of the fewest shares of `left` that have at most `most` each, as even as possible: a
// tile of one or two rows after full ones would leave most of the multipliers idle.
static AS_ALWAYS_INLINE int64_t EvenShare(int64_t left, int64_t most) {
  return CeilDiv(left, CeilDiv(left, most));
}

constexpr int64_t kLaneBytes = 4;
constexpr int64_t kVecBytes = kLanes * kLaneBytes;
// `columns` in whole vectors.
static AS_ALWAYS_INLINE int64_t WholeVecs(int64_t columns) {
  return CeilDiv(columns, kLanes) * kLanes;
}

// A vector of stored floats, and one of them, as float32. uint16_t is bfloat16.
static AS_ALWAYS_INLINE VecF LoadFloats(const float* p) { return LoadF(p); }
static AS_ALWAYS_INLINE VecF LoadFloats(const uint16_t* p) { return LoadBf16(p); }
static AS_ALWAYS_INLINE VecF LoadFloats(const Float16* p) { return LoadHalf(&p->bits); }
static AS_ALWAYS_INLINE float FloatOf(float x) { return x; }
static AS_ALWAYS_INLINE float FloatOf(uint16_t x) { return ToFloat(BFloat16{x}); }
static AS_ALWAYS_INLINE float FloatOf(Float16 x) { return ToFloat(x); }

// float32 A and B.
struct DotFloat {
  using A = float;
  static constexpr int64_t kGroup = 1;  // elements of A per step

  template <int R, int V, class Load>
  static AS_ALWAYS_INLINE void Step(VecF (&acc)[R][V], const float* a, int64_t lda, Load load) {
    VecF b[V];
    AS_UNROLL for (int v = 0; v < V; ++v) b[v] = AsFloat(load(v));
    AS_UNROLL for (int r = 0; r < R; ++r) {
      const VecF x = Set1(a[r * lda]);
      AS_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = Fma(x, b[v], acc[r][v]);
    }
  }
};

// Pairs of bfloat16 or of float16 in 32-bit lanes, as float32.
struct PairsOfBf16 {
  static AS_ALWAYS_INLINE VecF Low(VecI x) { return PairLow(x); }
  static AS_ALWAYS_INLINE VecF High(VecI x) { return PairHigh(x); }
};
struct PairsOfHalf {
  static AS_ALWAYS_INLINE VecF Low(VecI x) { return HalfLow(x); }
  static AS_ALWAYS_INLINE VecF High(VecI x) { return HalfHigh(x); }
};

// float32 A, pairs of 16-bit B. A pair's earlier element is added first.
template <class Pairs>
struct DotPairsOf {
  using A = float;
  static constexpr int64_t kGroup = 2;

  template <int R, int V, class Load>
  static AS_ALWAYS_INLINE void Step(VecF (&acc)[R][V], const float* a, int64_t lda, Load load) {
    VecF b[V];
    AS_UNROLL for (int v = 0; v < V; ++v) b[v] = Pairs::Low(load(v));
    AS_UNROLL for (int r = 0; r < R; ++r) {
      const VecF x = Set1(a[r * lda]);
      AS_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = Fma(x, b[v], acc[r][v]);
    }
    AS_UNROLL for (int v = 0; v < V; ++v) b[v] = Pairs::High(load(v));
    AS_UNROLL for (int r = 0; r < R; ++r) {
      const VecF x = Set1(a[r * lda + 1]);
      AS_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = Fma(x, b[v], acc[r][v]);
    }
  }
};

using DotPair = DotPairsOf<PairsOfBf16>;
using DotHalfPair = DotPairsOf<PairsOfHalf>;

#if defined(AS_KERNELS_NATIVE_BF16)
// bfloat16 A and B, two products per lane and instruction.
struct DotNative {
  using A = uint16_t;
  static constexpr int64_t kGroup = 2;

  template <int R, int V, class Load>
  static AS_ALWAYS_INLINE void Step(VecF (&acc)[R][V], const uint16_t* a, int64_t lda, Load load) {
    VecI b[V];
    AS_UNROLL for (int v = 0; v < V; ++v) b[v] = load(v);
    AS_UNROLL for (int r = 0; r < R; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, a + r * lda, 4);
      const VecI x = Set1Int(pair);
      AS_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = DotBf16(acc[r][v], x, b[v]);
    }
  }
};
#endif

// What a tile fetches into the cache while it computes: `step` bytes with every k group.
struct Fetch {
  const unsigned char* at;
  int64_t step;
};

// The operands of a tile.
template <class A>
struct TileArgs {
  const A* a;
  int64_t lda;
  const unsigned char* b;
  int64_t b_stride;  // bytes from one k group to the next
  int64_t groups;
  float* c;
  int64_t ldc;
  bool resume;  // continue from the values in c; otherwise from zero
  Fetch fetch;
};

// Fetches the step of one k group: one request per 64 bytes of V vectors, evenly spread.
template <int V>
static AS_ALWAYS_INLINE void FetchStep(Fetch& fetch) {
  constexpr int64_t kRequests = Higher(V * kVecBytes / 64, 1);
  const int64_t apart = fetch.step / kRequests;
  AS_UNROLL for (int64_t i = 0; i < kRequests; ++i) { PrefetchStream(fetch.at + i * apart); }
  fetch.at += fetch.step;
}

// R rows by V vectors of columns.
template <class Dot, int R, int V>
void Tile(const TileArgs<typename Dot::A>& args) {
  VecF acc[R][V];
  AS_UNROLL for (int r = 0; r < R; ++r) {
    AS_UNROLL for (int v = 0; v < V; ++v) {
      acc[r][v] = args.resume ? LoadF(args.c + r * args.ldc + v * kLanes) : Zero();
    }
  }
  const typename Dot::A* a = args.a;
  const unsigned char* b = args.b;
  const int64_t lda = args.lda, b_stride = args.b_stride;
  Fetch fetch = args.fetch;
  for (int64_t g = 0; g < args.groups; ++g) {
    FetchStep<V>(fetch);
    Dot::template Step<R, V>(
        acc, a,
        lda, [b](int v) __attribute__((always_inline)) { return LoadI(b + v * kVecBytes); });
    a += Dot::kGroup;
    b += b_stride;
  }
  AS_UNROLL for (int r = 0; r < R; ++r) {
    AS_UNROLL for (int v = 0; v < V; ++v) StoreF(args.c + r * args.ldc + v * kLanes, acc[r][v]);
  }
}

// R rows by the first `columns` lanes of one vector: memory beyond them is not read. c holds whole
// vectors.
template <class Dot, int R>
void TailTile(const TileArgs<typename Dot::A>& args, int64_t columns) {
  const Mask mask = FirstLanes(columns);
  VecF acc[R][1];
  AS_UNROLL for (int r = 0; r < R; ++r) {
    acc[r][0] = args.resume ? LoadF(args.c + r * args.ldc) : Zero();
  }
  const typename Dot::A* a = args.a;
  const unsigned char* b = args.b;
  for (int64_t g = 0; g < args.groups; ++g) {
    Dot::template Step<R, 1>(
        acc, a, args.lda,
        [ b, mask ](int) __attribute__((always_inline)) { return MaskLoadI(mask, b); });
    a += Dot::kGroup;
    b += args.b_stride;
  }
  AS_UNROLL for (int r = 0; r < R; ++r) StoreF(args.c + r * args.ldc, acc[r][0]);
}

// All columns: in tiles of V vectors, then of half as many, and so on down to one. A masked tile
// takes the rest.
template <class Dot, int R, int V>
static AS_ALWAYS_INLINE void TileColumnsFrom(TileArgs<typename Dot::A>& args, int64_t& columns) {
  while (columns >= V * kLanes) {
    Tile<Dot, R, V>(args);
    args.fetch.at += args.groups * args.fetch.step;
    args.b += V * kVecBytes;
    args.c += V * kLanes;
    columns -= V * kLanes;
  }
  if constexpr (V > 1) {
    TileColumnsFrom<Dot, R, V / 2>(args, columns);
  } else if (columns > 0) {
    TailTile<Dot, R>(args, columns);
  }
}

template <class Dot, int R>
static AS_ALWAYS_INLINE void TileColumns(TileArgs<typename Dot::A> args, int64_t columns) {
  TileColumnsFrom<Dot, R, TileVecs(R)>(args, columns);
}

// Calls run with the number of rows, R to kMost, as a constant.
template <int kMost, int R = 1, class Run>
static AS_ALWAYS_INLINE void WithRows(int64_t rows, Run run) {
  if constexpr (R < kMost) {
    if (rows > R) return WithRows<kMost, R + 1>(rows, run);
  }
  run.template operator()<R>();
}

// 1 to kTileRows rows. With WithRows instead of the switch, GCC 12 made products of many rows 6 %
// slower on AVX-512 and 12 % on AVX2 (kernels_bench, a Xeon with AVX-512 BF16).
template <class Dot>
void TileRows(int64_t rows, const TileArgs<typename Dot::A>& args, int64_t columns) {
  static_assert(kTileRows == 6);
  switch (rows) {
    case 1:
      return TileColumns<Dot, 1>(args, columns);
    case 2:
      return TileColumns<Dot, 2>(args, columns);
    case 3:
      return TileColumns<Dot, 3>(args, columns);
    case 4:
      return TileColumns<Dot, 4>(args, columns);
    case 5:
      return TileColumns<Dot, 5>(args, columns);
    default:
      return TileColumns<Dot, 6>(args, columns);
  }
}

// How rows are divided into tiles.
template <class Dot>
struct TileShape {
  // Up to this many rows stream B: one tile takes them all and reads B once.
  static constexpr int64_t kStreamRows = 1;
  // The rows of the next tile when `left` remain.
  static AS_ALWAYS_INLINE int64_t NextRows(int64_t left) { return EvenShare(left, kTileRows); }
};

// The share of the `bytes` at `next` that the tile of rows [row, row + tile_rows), out of `rows`,
// fetches. The fetches are spread as evenly as the work, since a burst of requests would stall on
// memory. A tile takes its columns in several passes, of `vecs` vectors each.
static AS_ALWAYS_INLINE Fetch FetchShare(const unsigned char* next, int64_t bytes, int64_t rows,
                                         int64_t row, int64_t tile_rows, int64_t groups,
                                         int64_t columns, int vecs) {
  const int64_t steps = groups * CeilDiv(columns, vecs * kLanes);
  if (steps == 0) return {next, 0};
  return {next + bytes * row / rows, CeilDiv(bytes * tile_rows / rows, steps)};
}

}  // namespace
}  // namespace allspark::kernels
