// Paged attention. A row is one token and one of the query heads that share the KV head. Rows pass
// over the cache in chunks of kAttentionChunk positions. Each chunk gives a maximum, a denominator
// and a weighted sum from fresh accumulators. They are merged in ascending order into the row's
// running results.
//
// A row's result depends only on its own position, query and visible keys: the rows of a tile share
// nothing but loads. Positions outside a row's range are never multiplied into it. So what memory
// holds there does not matter, and later tokens of a tile cannot change earlier ones.
#pragma once

#include "kernels/attention_scratch.h"
#include "kernels/cpu/attention_tile.inl"
#include "kernels/cpu/cache.inl"
#include "kernels/cpu/cache_quantized.inl"
#include "kernels/cpu/math.inl"
#include "kernels/cpu/rowwise.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {
namespace {

static_assert(kLanes <= kAttentionDimPadding && kAttentionRows % kLanes == 0);
static_assert(kAttentionChunk % kSpan == 0);

// Regions of the caller's scratch memory. `dim` is head_dim rounded up to whole vectors.
struct AttentionScratch {
  int64_t dim;
  float* q;                  // [kAttentionRows][dim], in the dot product's element type
  float* sum;                // [kAttentionRows][dim]
  float* chunk_sum;          // [kAttentionRows][dim]
  float* scores;             // [kAttentionRows][kAttentionChunk]; then weights, in q's element type
  float* highest;            // [kAttentionRows]
  float* denominator;        // [kAttentionRows]
  float* chunk_highest;      // [kAttentionRows]
  float* chunk_denominator;  // [kAttentionRows]
  // Quantised caches only: the factors of a row's scores and of its sums.
  float* query_scale;   // [kAttentionRows]
  float* weight_scale;  // [kAttentionRows], of one chunk
  Staging staging;
};

static AS_ALWAYS_INLINE AttentionScratch SplitScratch(float* scratch, int64_t head_dim) {
  float* p = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
  AttentionScratch s;
  s.dim = AttentionDim(head_dim);
  s.q = p;
  s.sum = s.q + kAttentionRows * s.dim;
  s.chunk_sum = s.sum + kAttentionRows * s.dim;
  s.scores = s.chunk_sum + kAttentionRows * s.dim;
  s.highest = s.scores + kAttentionRows * kAttentionChunk;
  s.denominator = s.highest + kAttentionRows;
  s.chunk_highest = s.denominator + kAttentionRows;
  s.chunk_denominator = s.chunk_highest + kAttentionRows;
  s.query_scale = s.chunk_denominator + kAttentionRows;
  s.weight_scale = s.query_scale + kAttentionRows;
  s.staging.key_scales = s.weight_scale + kAttentionRows;
  s.staging.value_scales = s.staging.key_scales + kAttentionChunk;
  s.staging.lanes = reinterpret_cast<unsigned char*>(s.staging.value_scales + kAttentionChunk);
  return s;
}

// Positions [begin, end).
struct KeyRange {
  int64_t begin, end;
};

static AS_ALWAYS_INLINE KeyRange Intersect(KeyRange a, KeyRange b) {
  return {Higher(a.begin, b.begin), Lower(a.end, b.end)};
}
static AS_ALWAYS_INLINE bool Empty(KeyRange x) { return x.begin >= x.end; }
static AS_ALWAYS_INLINE bool Covers(KeyRange a, KeyRange b) {
  return a.begin <= b.begin && a.end >= b.end;
}

static AS_ALWAYS_INLINE KeyRange VisibleKeys(const AttentionArgs& args, int64_t row) {
  const int64_t end = args.begin_position + args.token_begin + row / args.group + 1;
  return {args.window > 0 && end > args.window ? end - args.window : 0, end};
}

// The rows of one call of AttendRows, at most kAttentionRows.
struct RowBlock {
  int64_t first, count;
  const KeyRange* visible;  // of each row; read often, and computing one takes a division
};

// scores[r][p - chunk] = q[r] . k[p] for all rows and the positions p of `seen`. Positions beside
// `seen`, up to whole tiles, get arbitrary scores.
template <class Head, class Dot, class Lanes>
void Scores(const AttentionArgs& args, const Head& head, const AttentionScratch& s, int64_t rows,
            int64_t chunk, KeyRange seen) {
  using A = typename Dot::A;
  for (int64_t begin = seen.begin / kSpan * kSpan; begin < seen.end; begin += kSpan) {
    const KeyRange span = Intersect(seen, {begin, begin + kSpan});
    const SpanRange range{begin, span.begin, span.end};
    const Span keys = head.template Keys<Lanes>(range, s.staging);
    const Ahead values = AheadOf(head, range, /*keys=*/false);
    ScoreTileArgs<A> tile;
    tile.lda = s.dim * 4 / static_cast<int64_t>(sizeof(A));
    tile.keys = &keys;
    tile.ahead = &values;
    tile.groups = args.head_dim / Dot::kGroup;
    tile.ldc = kAttentionChunk;
    tile.begin = span.begin - begin;
    tile.end = span.end - begin;
    for (int64_t r = 0; r < rows;) {
      const int64_t tile_rows = AttentionTileShape<Dot>::NextRows(rows - r);
      tile.fetched = AheadGranules<Dot>(r, r + tile_rows, rows);
      tile.a = reinterpret_cast<const A*>(s.q) + r * tile.lda;
      tile.c = s.scores + r * kAttentionChunk + (begin - chunk);
      ScoreRows<Dot, Lanes>(tile_rows, tile);
      r += tile_rows;
    }
  }
}

// chunk_sum[row] += sum of weight[row][p] * v[p] over the positions p of `range`, which lies within
// the span that begins at `begin`. If only a part of a group is visible, zeros replace the other
// values, whose weights are zero too.
template <class Dot, class Lanes>
void AddEdge(const AttentionScratch& s, int64_t head_dim, int64_t row, int64_t chunk,
             const Span& values, int64_t begin, KeyRange range) {
  using A = typename Dot::A;
  constexpr int64_t kGroup = Dot::kGroup;
  const A* weights = reinterpret_cast<const A*>(s.scores + row * kAttentionChunk) + (begin - chunk);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Mask columns = FirstLanes(head_dim - d);
    VecF acc[1][1] = {{LoadF(s.chunk_sum + row * s.dim + d)}};
    for (int64_t g = (range.begin - begin) / kGroup; g * kGroup < range.end - begin; ++g) {
      VecI lanes = Lanes::LoadMasked(columns, values.Group<kGroup>(g) + d * Lanes::kBytes,
                                     Lanes::ValueZeros(values, g));
      if (kGroup == 2 && begin + 2 * g < range.begin) lanes = And(lanes, Set1Int(~0xffff));
      if (kGroup == 2 && begin + 2 * g + 1 >= range.end) lanes = And(lanes, Set1Int(0xffff));
      Dot::template Step<1, 1>(
          acc, weights + g * kGroup,
          0, [lanes](int) __attribute__((always_inline)) { return lanes; });
    }
    StoreF(s.chunk_sum + row * s.dim + d, acc[0][0]);
  }
}

// The keys that are read after a chunk's values: those of the next chunk, or those that the caller
// names as next. While a span of values is read, the keys at the same offset from `begin` are
// fetched.
template <class Head>
struct NextKeys {
  Head head;
  int64_t begin;   // the first position of a chunk
  KeyRange range;  // the positions that are read

  // What the span at `offset` within its chunk fetches. Returns false if there is nothing to fetch.
  __attribute__((always_inline)) bool At(int64_t offset, Ahead* ahead) const {
    const int64_t first = begin + offset;
    const KeyRange span = Intersect(range, {first, first + kSpan});
    if (Empty(span)) return false;
    *ahead = AheadOf(head, {first, span.begin, span.end}, /*keys=*/true);
    return true;
  }
};

template <class Head>
static AS_ALWAYS_INLINE Head HeadOf(const AttentionArgs& args, const int32_t* block_table,
                                    int64_t kv_head) {
  return {CacheParts::Of(args.kv, block_table, kv_head), args.head_dim};
}

// chunk: the current one; all: the positions that the rows see.
template <class Head>
static AS_ALWAYS_INLINE NextKeys<Head> KeysAfter(const AttentionArgs& args, const Head& head,
                                                 int64_t chunk, KeyRange all, bool last_rows) {
  const int64_t next = chunk + kAttentionChunk;
  if (next < all.end) return {head, next, {next, all.end}};
  if (!last_rows || args.next_block_table == nullptr) return {head, 0, {0, 0}};
  return {HeadOf<Head>(args, args.next_block_table, args.next_kv_head),
          args.next_begin / kAttentionChunk * kAttentionChunk,
          {args.next_begin, args.next_end}};
}

// chunk_sum[r] = sum of weight[r][p] * v[p] over the chunk's positions p that row r sees,
// ascending.
template <class Dot>
struct ChunkValues {
  template <class Head, class Lanes>
  static void Sum(const AttentionArgs& args, const Head& head, const AttentionScratch& s,
                  const RowBlock& rows, int64_t chunk, KeyRange seen, const NextKeys<Head>& next) {
    using A = typename Dot::A;
    constexpr int64_t kGroup = Dot::kGroup;
    for (int64_t i = 0; i < rows.count * s.dim; i += kLanes) StoreF(s.chunk_sum + i, Zero());
    const KeyRange whole{chunk, chunk + kAttentionChunk};
    for (int64_t begin = seen.begin / kSpan * kSpan; begin < seen.end; begin += kSpan) {
      const KeyRange span = Intersect(seen, {begin, begin + kSpan});
      const Span values = head.template Values<Lanes>({begin, span.begin, span.end}, s.staging);
      Ahead next_keys{};
      const bool more = next.At(begin - chunk, &next_keys);
      ValueTileArgs<A> tile;
      tile.lda = kAttentionChunk * 4 / static_cast<int64_t>(sizeof(A));
      tile.values = &values;
      tile.group_lines = args.head_dim * kLaneBytes / 64;
      tile.ahead = &next_keys;
      tile.ldc = s.dim;
      for (int64_t r = 0; r < rows.count;) {
        const int64_t tile_rows = AttentionTileShape<Dot>::NextRows(rows.count - r);
        // The positions that every row of the tile sees, in whole groups. The last row's range
        // begins last, and the first row's range ends first.
        KeyRange common = Intersect(rows.visible[r + tile_rows - 1], whole);
        common.end = Lower(common.end, rows.visible[r].end);
        common = {CeilDiv(common.begin, kGroup) * kGroup, common.end / kGroup * kGroup};
        if (Empty(common)) common = {whole.end, whole.end};
        const KeyRange shared = Intersect(common, span);
        for (int64_t i = r; i < r + tile_rows; ++i) {
          const KeyRange visible = Intersect(rows.visible[i], span);
          const KeyRange edge{visible.begin, Lower(visible.end, common.begin)};
          if (!Empty(edge)) AddEdge<Dot, Lanes>(s, args.head_dim, i, chunk, values, begin, edge);
        }
        if (!Empty(shared)) {
          tile.a = reinterpret_cast<const A*>(s.scores + r * kAttentionChunk) + (begin - chunk);
          tile.c = s.chunk_sum + r * s.dim;
          tile.fetched = more ? AheadGranules<Dot>(r, r + tile_rows, rows.count) : 0;
          tile.group_begin = (shared.begin - begin) / kGroup;
          tile.group_end = (shared.end - begin) / kGroup;
          ValueRows<Dot, Lanes>(tile_rows, tile, args.head_dim);
        }
        for (int64_t i = r; i < r + tile_rows; ++i) {
          const KeyRange visible = Intersect(rows.visible[i], span);
          const KeyRange edge{Higher(visible.begin, common.end), visible.end};
          if (!Empty(edge)) AddEdge<Dot, Lanes>(s, args.head_dim, i, chunk, values, begin, edge);
        }
        r += tile_rows;
      }
    }
  }
};

// One row's softmax over one chunk. weight_scale: the factor of its sums, where values have scales.
struct ChunkSoftmax {
  float highest, denominator, weight_scale;
};

// Added to a row's scores: slope * (position - the row's position).
struct PositionBias {
  float slope;
  int64_t distance;  // from the row's position to the chunk's first; 0 or less

  // The bias of the positions from i on, within the chunk.
  __attribute__((always_inline)) VecF At(int64_t i) const {
    const VecF first = Set1(static_cast<float>(distance + i));
    return Mul(Add(first, LoadF(kLaneNumbers)), Set1(slope));
  }
};

// A score as a float. An integer score is multiplied by its key's scale.
template <bool kScaled>
static AS_ALWAYS_INLINE VecF LoadScore(const float* score, const float* scale) {
  if constexpr (!kScaled) return LoadF(score);
  return Mul(IntToFloat(LoadI(score)), LoadF(scale));
}

// Weights times values' scales, for storing as integers of 15 bits. The largest scale that the row
// sees maps to the largest integer, since weights are at most 1. Rounding of large scores can give
// a weight above 1; the store saturates.
struct WeightScaling {
  float scale;
  VecF inverse;

  // For the values [begin, end) of a chunk. A NaN among their scales makes the row's scale NaN.
  static AS_ALWAYS_INLINE WeightScaling Of(const float* scales, int64_t begin, int64_t end) {
    constexpr float kMost = 32767.0f;
    const float highest = HighestMagnitude(scales + begin, end - begin);
    if (highest >= kQuantizeTiny / 256) return {highest / kMost, Set1(kMost / highest)};
    return {highest != highest ? highest : 0.0f, Zero()};
  }

  // The factor of a value. The scale of a token that the row does not see may be anything.
  __attribute__((always_inline)) VecF Apply(VecF weight, const float* scales) const {
    return Select(Less(Zero(), weight), Mul(weight, Mul(LoadF(scales), inverse)), Zero());
  }
};

// For values without scales.
struct NoScaling {
  static constexpr float scale = 1.0f;
  static AS_ALWAYS_INLINE NoScaling Of(const float*, int64_t, int64_t) { return {}; }
  static AS_ALWAYS_INLINE VecF Apply(VecF weight, const float*) { return weight; }
};
template <bool kScaled>
struct ScalingIf : NoScaling {};
template <>
struct ScalingIf<true> : WeightScaling {};

// Turns the scores of [begin, end), within the chunk, into weights e^(scale * score - highest).
// Positions beside them, up to whole vectors, get zero. kScaled: scores are first multiplied by the
// keys' scales, and weights last by the values' scales.
template <class A, bool kScaled>
static AS_ALWAYS_INLINE ChunkSoftmax Softmax(float* scores, const Staging& staging, int64_t begin,
                                             int64_t end, float scale, float soft_cap,
                                             PositionBias bias) {
  const int64_t first = begin / kLanes * kLanes;
  // With a soft cap or a bias, scores are scaled before it. Otherwise the exponent includes the
  // scale, in one operation with `highest`.
  const bool biased = bias.slope != 0;
  const bool finished = soft_cap > 0 || biased;
  const float factor = finished ? 1.0f : scale;
  VecF highest = Set1(kNoScore);
  for (int64_t i = first; i < end; i += kLanes) {
    VecF x = LoadScore<kScaled>(scores + i, staging.key_scales + i);
    const bool edge = i < begin || i + kLanes > end;
    if (soft_cap > 0) x = Mul(Set1(soft_cap), Tanh(Mul(x, Set1(scale / soft_cap))));
    if (biased) x = Fma(x, Set1(soft_cap > 0 ? 1.0f : scale), bias.At(i));
    if (edge) x = Select(RangeMask(i, begin, end), x, Set1(kNoScore));
    highest = Max(x, highest);
    if (kScaled || edge || finished) StoreF(scores + i, x);
  }
  ChunkSoftmax result;
  result.highest = factor * ReduceMax(highest);
  // If every score is minus infinity, all weights are zero, not NaN. They would also be zero in a
  // larger chunk with a finite score.
  const VecF factors = WeightFunction<A>::Factor(factor);
  const VecF shift = WeightFunction<A>::Shift(result.highest == kNoScore ? 0.0f : result.highest);
  const ScalingIf<kScaled> scaling{ScalingIf<kScaled>::Of(staging.value_scales, begin, end)};
  A* weights = reinterpret_cast<A*>(scores);
  VecF sum = Zero();
  for (int64_t i = first; i < end; i += kLanes) {
    const VecF weight = WeightFunction<A>::Weight(LoadF(scores + i), factors, shift);
    sum = Add(sum, weight);
    StoreWeights(weights + i, scaling.Apply(weight, staging.value_scales + i));
  }
  result.denominator = ReduceAdd(sum);
  result.weight_scale = scaling.scale;
  return result;
}

// The same bits for R rows that see the whole chunk, without soft cap and bias: most rows of a long
// prompt. The rows are interleaved, since one row's chain of operations leaves half of the
// arithmetic units idle.
constexpr int kMostTogether = 4;
template <class A, bool kScaled, int R>
void WholeSoftmax(const AttentionScratch& s, int64_t first_row, float args_scale) {
  const Staging& staging = s.staging;
  float* scores = s.scores + first_row * kAttentionChunk;
  float* highest = s.chunk_highest + first_row;
  VecF sum[R], shift[R], factor[kScaled ? R : 1];
  AS_UNROLL for (int r = 0; r < R; ++r) {
    const float scale = kScaled ? args_scale * s.query_scale[first_row + r] : args_scale;
    if (kScaled || r == 0) factor[r] = WeightFunction<A>::Factor(scale);
    float* row = scores + r * kAttentionChunk;
    VecF most[4];
    AS_UNROLL for (int j = 0; j < 4; ++j) most[j] = Set1(kNoScore);
    for (int64_t begin = 0; begin < kAttentionChunk; begin += 4 * kLanes) {
      AS_UNROLL for (int j = 0; j < 4; ++j) {
        const int64_t i = begin + j * kLanes;
        const VecF x = LoadScore<kScaled>(row + i, staging.key_scales + i);
        if (kScaled) StoreF(row + i, x);
        most[j] = Max(x, most[j]);
      }
    }
    highest[r] = scale * ReduceMax(Max(Max(most[0], most[1]), Max(most[2], most[3])));
    shift[r] = WeightFunction<A>::Shift(highest[r] == kNoScore ? 0.0f : highest[r]);
    sum[r] = Zero();
  }
  const ScalingIf<kScaled> scaling{
      ScalingIf<kScaled>::Of(staging.value_scales, 0, kAttentionChunk)};
  for (int64_t i = 0; i < kAttentionChunk; i += 2 * kLanes) {
    AS_UNROLL for (int r = 0; r < R; ++r) {
      float* row = scores + r * kAttentionChunk;
      const VecF first =
          WeightFunction<A>::Weight(LoadF(row + i), factor[kScaled ? r : 0], shift[r]);
      const VecF second =
          WeightFunction<A>::Weight(LoadF(row + i + kLanes), factor[kScaled ? r : 0], shift[r]);
      sum[r] = Add(Add(sum[r], first), second);
      StoreWeights(reinterpret_cast<A*>(row) + i, scaling.Apply(first, staging.value_scales + i),
                   scaling.Apply(second, staging.value_scales + i + kLanes));
    }
  }
  AS_UNROLL for (int r = 0; r < R; ++r) {
    s.chunk_denominator[first_row + r] = ReduceAdd(sum[r]);
    s.weight_scale[first_row + r] = scaling.scale;
  }
}

// The factors of a row's running result (keep) and of its next chunk's result (take).
struct MergeFactors {
  VecF highest, keep, take;
};

static AS_ALWAYS_INLINE MergeFactors FactorsOf(VecF old, VecF chunk) {
  MergeFactors f;
  f.highest = Max(chunk, old);
  const VecF shift = Select(Less(Set1(kNoScore), f.highest), f.highest, Zero());
  f.keep = Exp(Sub(old, shift));
  f.take = Exp(Sub(chunk, shift));
  return f;
}

static AS_ALWAYS_INLINE VecF MergeDenominator(const MergeFactors& f, VecF old, VecF chunk) {
  return Add(Mul(old, f.keep), Mul(chunk, f.take));
}

static AS_ALWAYS_INLINE void MergeSum(float* sum, const float* chunk_sum, int64_t dim, VecF keep,
                                      VecF take) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    StoreF(sum + d, Fma(LoadF(sum + d), keep, Mul(LoadF(chunk_sum + d), take)));
  }
}

// Merges the chunk's results into the rows' running results.
static AS_ALWAYS_INLINE void Merge(const AttentionScratch& s, const RowBlock& rows,
                                   KeyRange chunk) {
  for (int64_t r = 0; r < rows.count; r += kLanes) {
    const VecF chunk_denominator = LoadF(s.chunk_denominator + r);
    const MergeFactors f = FactorsOf(LoadF(s.highest + r), LoadF(s.chunk_highest + r));
    StoreF(s.highest + r, f.highest);
    StoreF(s.denominator + r, MergeDenominator(f, LoadF(s.denominator + r), chunk_denominator));
    float keep[kLanes], take[kLanes];
    StoreF(keep, f.keep);
    StoreF(take, f.take);
    for (int64_t i = r; i < Lower(r + kLanes, rows.count); ++i) {
      if (Empty(Intersect(rows.visible[i], chunk))) continue;
      MergeSum(s.sum + i * s.dim, s.chunk_sum + i * s.dim, s.dim, Set1(keep[i - r]),
               Set1(take[i - r]));
    }
  }
}

static AS_ALWAYS_INLINE float SlopeOf(const AttentionArgs& args, int64_t row) {
  return args.slopes == nullptr ? 0.0f : args.slopes[args.kv_head * args.group + row % args.group];
}

// Converts a chunk's integer sums to floats.
static AS_ALWAYS_INLINE void ScaleSums(const AttentionScratch& s, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    float* sum = s.chunk_sum + r * s.dim;
    const VecF scale = Set1(s.weight_scale[r]);
    for (int64_t d = 0; d < s.dim; d += kLanes) {
      StoreF(sum + d, Mul(IntToFloat(LoadI(sum + d)), scale));
    }
  }
}

// Computes one chunk's maximum, denominator and weighted sum for every row that sees some of it.
template <class Head, class Dot>
void AttendChunk(const AttentionArgs& args, const Head& head, const AttentionScratch& s,
                 const RowBlock& rows, int64_t chunk, KeyRange all, bool last_rows) {
  const KeyRange whole{chunk, chunk + kAttentionChunk};
  const KeyRange seen = Intersect(all, whole);
  // If only one tile reads the keys and values, widening them first does not pay.
  const bool stored = rows.count <= kMostTileRows;
  if (stored) {
    Scores<Head, Dot, typename Head::StoredKeys>(args, head, s, rows.count, chunk, seen);
  } else {
    Scores<Head, Dot, WideLanes>(args, head, s, rows.count, chunk, seen);
  }
  if constexpr (Head::kScaled) head.CopyValueScales(seen.begin, seen.end, s.staging);
  const bool plain = args.soft_cap <= 0 && args.slopes == nullptr;
  for (int64_t r = 0; r < rows.count;) {
    const int64_t together = Lower(kMostTogether, rows.count - r);
    if (plain && Covers(rows.visible[r], whole) && Covers(rows.visible[r + together - 1], whole)) {
      WithRows<kMostTogether>(together, [&s, r, scale = args.scale]<int R>() {
        WholeSoftmax<typename Dot::A, Head::kScaled, R>(s, r, scale);
      });
      r += together;
      continue;
    }
    const KeyRange visible = Intersect(rows.visible[r], whole);
    const PositionBias bias{SlopeOf(args, rows.first + r), chunk + 1 - rows.visible[r].end};
    const float scale = Head::kScaled ? args.scale * s.query_scale[r] : args.scale;
    const ChunkSoftmax softmax =
        Empty(visible) ? ChunkSoftmax{kNoScore, 0, 0}
                       : Softmax<typename Dot::A, Head::kScaled>(
                             s.scores + r * kAttentionChunk, s.staging, visible.begin - chunk,
                             visible.end - chunk, scale, args.soft_cap, bias);
    s.chunk_highest[r] = softmax.highest;
    s.chunk_denominator[r] = softmax.denominator;
    s.weight_scale[r] = softmax.weight_scale;
    ++r;
  }
  const NextKeys<Head> next = KeysAfter(args, head, chunk, all, last_rows);
  if (stored) {
    ChunkValues<Dot>::template Sum<Head, typename Head::StoredValues>(args, head, s, rows, chunk,
                                                                      seen, next);
  } else {
    ChunkValues<Dot>::template Sum<Head, WideLanes>(args, head, s, rows, chunk, seen, next);
  }
  if constexpr (Head::kScaled) ScaleSums(s, rows.count);
}

static AS_ALWAYS_INLINE const float* QueryRow(const AttentionArgs& args, int64_t row) {
  const int64_t token = args.token_begin + row / args.group;
  return args.q + token * args.ldq + (args.kv_head * args.group + row % args.group) * args.head_dim;
}

// Writes a chunk's partial results in the layout that AttentionArgs gives.
static AS_ALWAYS_INLINE void StorePartials(const AttentionArgs& args, const AttentionScratch& s,
                                           const RowBlock& rows, int64_t chunk) {
  const int64_t size = AttentionPartialFloats(args.head_dim);
  const int64_t index = (chunk / kAttentionChunk - args.chunk_begin) * args.group + rows.first;
  for (int64_t r = 0; r < rows.count; ++r) {
    float* partial = args.partials + (index + r) * size;
    for (int64_t d = 0; d < s.dim; d += kLanes) {
      StoreF(partial + d, LoadF(s.chunk_sum + r * s.dim + d));
    }
    partial[s.dim] = s.chunk_highest[r];
    partial[s.dim + 1] = s.chunk_denominator[r];
  }
}

template <class Out>
static AS_ALWAYS_INLINE void StoreRow(Out* out, const float* sum, int64_t head_dim,
                                      VecF denominator) {
  ForEachVec(
      head_dim, [&](int64_t i, auto load, auto store) __attribute__((always_inline)) {
        store(out + i, Div(load(sum + i), denominator));
      });
}

// Up to kAttentionRows rows over all chunks that any of them sees, or the requested ones of these.
template <class Head, class Dot, class Out>
void AttendRows(const AttentionArgs& args, const Head& head, const AttentionScratch& s,
                const RowBlock& rows, bool last_rows) {
  using A = typename Dot::A;
  const int64_t head_dim = args.head_dim;
  for (int64_t r = 0; r < rows.count; ++r) {
    const float* q = QueryRow(args, rows.first + r);
    A* to = reinterpret_cast<A*>(s.q + r * s.dim);
    s.query_scale[r] = PlaceQuery(q, head_dim, to);
    for (int64_t d = 0; d < s.dim; d += kLanes) StoreF(s.sum + r * s.dim + d, Zero());
  }
  for (int64_t r = 0; r < rows.count; r += kLanes) {
    StoreF(s.highest + r, Set1(kNoScore));
    StoreF(s.denominator + r, Zero());
  }
  KeyRange all{rows.visible[0].begin, rows.visible[rows.count - 1].end};
  if (args.partials != nullptr) {
    all = Intersect(all, {args.chunk_begin * kAttentionChunk, args.chunk_end * kAttentionChunk});
  }
  for (int64_t chunk = all.begin / kAttentionChunk * kAttentionChunk; chunk < all.end;
       chunk += kAttentionChunk) {
    AttendChunk<Head, Dot>(args, head, s, rows, chunk, all, last_rows);
    if (args.partials != nullptr) {
      StorePartials(args, s, rows, chunk);
    } else {
      Merge(s, rows, {chunk, chunk + kAttentionChunk});
    }
  }
  if (args.partials != nullptr) return;
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t token = args.token_begin + (rows.first + r) / args.group;
    const int64_t q_head = args.kv_head * args.group + (rows.first + r) % args.group;
    StoreRow(static_cast<Out*>(args.out) + token * args.ldo + q_head * head_dim, s.sum + r * s.dim,
             head_dim, Set1(s.denominator[r]));
  }
}

template <class Head, class Dot, class Out>
void Attention(const AttentionArgs& args) noexcept {
  const AttentionScratch s = SplitScratch(args.scratch, args.head_dim);
  const Head head = HeadOf<Head>(args, args.block_table, args.kv_head);
  const int64_t rows = (args.token_end - args.token_begin) * args.group;
  for (int64_t row = 0; row < rows; row += kAttentionRows) {
    KeyRange visible[kAttentionRows];
    const RowBlock block{row, Lower(kAttentionRows, rows - row), visible};
    for (int64_t i = 0; i < block.count; ++i) visible[i] = VisibleKeys(args, row + i);
    AttendRows<Head, Dot, Out>(args, head, s, block, row + kAttentionRows >= rows);
  }
}

// As Merge, one row at a time.
template <class Out>
void AttentionMerge(const AttentionMergeArgs& args) noexcept {
  const int64_t dim = AttentionDim(args.head_dim), size = AttentionPartialFloats(args.head_dim);
  constexpr int64_t kMostDims = 1024;  // dimensions at a time
  for (int64_t row = args.row_begin; row < args.row_end; ++row) {
    for (int64_t begin = 0; begin < dim; begin += kMostDims) {
      const int64_t dims = Lower(kMostDims, dim - begin);
      float sum[kMostDims];
      for (int64_t d = 0; d < dims; d += kLanes) StoreF(sum + d, Zero());
      VecF highest = Set1(kNoScore), denominator = Zero();
      for (int64_t chunk = 0; chunk < args.num_chunks; ++chunk) {
        const float* partial = args.partials + (chunk * args.group + row) * size;
        const VecF chunk_denominator = Set1(partial[dim + 1]);
        const MergeFactors f = FactorsOf(highest, Set1(partial[dim]));
        highest = f.highest;
        denominator = MergeDenominator(f, denominator, chunk_denominator);
        MergeSum(sum, partial + begin, dims, f.keep, f.take);
      }
      StoreRow(static_cast<Out*>(args.out) + row * args.head_dim + begin, sum,
               Lower(dims, args.head_dim - begin), denominator);
    }
  }
}

template <class Head, class Dot>
static AS_ALWAYS_INLINE void FillAttention(KernelTable& table, DType cache) {
  const int i = static_cast<int>(cache);
  table.attention[i][static_cast<int>(DType::kFloat32)] = Attention<Head, Dot, float>;
  table.attention[i][static_cast<int>(DType::kBFloat16)] = Attention<Head, Dot, uint16_t>;
}

static AS_ALWAYS_INLINE void FillQuantizedAttention(KernelTable& table) {
  FillAttention<QuantizedHead<8, 8>, DotInteger>(table, DType::kInt8);
  FillAttention<QuantizedHead<4, 4>, DotInteger>(table, DType::kUInt4);
  FillAttention<QuantizedHead<8, 4>, DotInteger>(table, DType::kInt8UInt4);
}

}  // namespace
}  // namespace allspark::kernels
