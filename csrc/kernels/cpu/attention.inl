// Paged attention. Rows (one per token and query head that share the KV head) pass over the cache
// in chunks of kAttentionChunk positions; each chunk gives a maximum, a denominator and a weighted
// sum from fresh accumulators, merged in ascending order into the row's running ones.
//
// What a row computes depends on its own position, query and visible keys alone: tiles only share
// loads. Positions outside a row's range are never multiplied into it, so what memory holds there
// does not matter, and later tokens of the same tile cannot disturb earlier ones.
#pragma once

#include "kernels/attention_scratch.h"
#include "kernels/cpu/cache.inl"
#include "kernels/cpu/math.inl"
#include "kernels/cpu/rowwise.inl"

namespace allspark::kernels {
namespace {

static_assert(kTileRows <= kAttentionTileRows && kLanes <= kAttentionDimPadding);
// Scores are computed by whole vectors within a block, the smallest of which holds 16 tokens.
static_assert(16 % kLanes == 0 && kAttentionChunk % kLanes == 0);

constexpr float kNoScore = -__builtin_huge_valf();

AS_ALWAYS_INLINE int64_t Lower(int64_t a, int64_t b) { return a < b ? a : b; }
AS_ALWAYS_INLINE int64_t Higher(int64_t a, int64_t b) { return a > b ? a : b; }

// Regions of the caller's scratch memory, `dim` floats per row: head_dim rounded up to whole
// vectors.
struct AttentionScratch {
  int64_t dim;
  float* q;            // [kAttentionRows][dim]
  float* sum;          // [kAttentionRows][dim]
  float* highest;      // [kAttentionRows]
  float* denominator;  // [kAttentionRows]
  float* chunk_sum;    // [kAttentionTileRows][dim]
  float* scores;       // [kAttentionTileRows][kAttentionChunk]
};

AS_ALWAYS_INLINE AttentionScratch SplitScratch(float* scratch, int64_t head_dim) {
  float* p = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
  AttentionScratch s;
  s.dim = (head_dim + kAttentionDimPadding - 1) / kAttentionDimPadding * kAttentionDimPadding;
  s.q = p;
  s.sum = s.q + kAttentionRows * s.dim;
  s.chunk_sum = s.sum + kAttentionRows * s.dim;
  s.scores = s.chunk_sum + kAttentionTileRows * s.dim;
  s.highest = s.scores + kAttentionTileRows * kAttentionChunk;
  s.denominator = s.highest + 32;
  return s;
}

// The positions [begin, end) that a row sees.
struct KeyRange {
  int64_t begin, end;
};

AS_ALWAYS_INLINE KeyRange VisibleKeys(const AttentionArgs& args, int64_t row) {
  const int64_t end = args.begin_position + args.token_begin + row / args.group + 1;
  return {args.window > 0 && end > args.window ? end - args.window : 0, end};
}

// scores[r][p - chunk] = q[r] . k[p] for lo <= p < hi; also for neighbours up to whole vectors,
// which hold anything and are masked later.
template <class T, class Dot>
void Scores(const CacheHead<T>& head, const AttentionScratch& s, int64_t head_dim, int64_t row,
            int64_t rows, int64_t chunk, int64_t lo, int64_t hi) {
  TileArgs<float> tile;
  tile.a = s.q + row * s.dim;
  tile.lda = s.dim;
  tile.b_stride = head.block_size * kLaneBytes;
  tile.groups = head_dim / Dot::kGroup;
  tile.ldc = kAttentionChunk;
  tile.resume = false;
  tile.prefetch = head_dim / Dot::kGroup * tile.b_stride;
  lo = lo / kLanes * kLanes;
  hi = (hi + kLanes - 1) / kLanes * kLanes;
  while (lo < hi) {
    const int64_t token = lo % head.block_size;
    const int64_t columns = Lower(head.block_size - token, hi - lo);
    tile.b = head.Keys(lo) + token * kLaneBytes;
    tile.c = s.scores + (lo - chunk);
    TileRows<Dot>(rows, tile, columns);
    lo += columns;
  }
}

// Scores of [begin, end) (within the chunk) become weights e^(score - highest), zero in the
// neighbours.
struct ChunkSoftmax {
  float highest, denominator;
};

AS_ALWAYS_INLINE ChunkSoftmax Softmax(float* scores, int64_t begin, int64_t end, float scale,
                                      float soft_cap) {
  const int64_t first = begin / kLanes * kLanes;
  VecF highest = Set1(kNoScore);
  for (int64_t i = first; i < end; i += kLanes) {
    VecF x = Mul(LoadF(scores + i), Set1(scale));
    if (soft_cap > 0) x = Mul(Set1(soft_cap), Tanh(Div(x, Set1(soft_cap))));
    x = Select(RangeMask(i, begin, end), x, Set1(kNoScore));
    highest = Max(x, highest);
    StoreF(scores + i, x);
  }
  ChunkSoftmax result;
  result.highest = ReduceMax(highest);
  // Where every score is minus infinity, all weights are zero rather than NaN, as if in a larger
  // chunk.
  const VecF shift = Set1(result.highest == kNoScore ? 0.0f : result.highest);
  VecF sum = Zero();
  for (int64_t i = first; i < end; i += kLanes) {
    const VecF weight = Exp(Sub(LoadF(scores + i), shift));
    sum = Add(sum, weight);
    StoreF(scores + i, weight);
  }
  result.denominator = ReduceAdd(sum);
  return result;
}

// sum[r] += weight[r][token] * v[token] for one token whose pair is not taken whole.
AS_ALWAYS_INLINE void AddHalfPair(const unsigned char* pair, bool later, const float* weights,
                                  int64_t rows, int64_t head_dim, float* sums, int64_t dim) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const VecI lanes = MaskLoadI(FirstLanes(head_dim - d), pair + d * kLaneBytes);
    const VecF v = later ? PairHigh(lanes) : PairLow(lanes);
    for (int64_t r = 0; r < rows; ++r) {
      float* sum = sums + r * dim + d;
      StoreF(sum, Fma(Set1(weights[r * kAttentionChunk]), v, LoadF(sum)));
    }
  }
}

// chunk_sum[r] += sum over tokens lo <= p < hi ascending of weight[r][p] * v[p], for tile rows
// [row, row + rows).
template <class T, class Dot>
void AddValues(const CacheHead<T>& head, const AttentionScratch& s, int64_t head_dim, int64_t row,
               int64_t rows, int64_t chunk, int64_t lo, int64_t hi) {
  constexpr int64_t kGroup = Dot::kGroup;
  float* sums = s.chunk_sum + row * s.dim;
  TileArgs<float> tile;
  tile.lda = kAttentionChunk;
  tile.b_stride = head_dim * kLaneBytes;
  tile.c = sums;
  tile.ldc = s.dim;
  tile.resume = true;
  while (lo < hi) {
    const int64_t token = lo % head.block_size;
    const float* weights = s.scores + row * kAttentionChunk + (lo - chunk);
    const unsigned char* lanes = head.Values(lo) + token / kGroup * tile.b_stride;
    int64_t tokens = Lower(head.block_size - token, hi - lo);
    if (token % kGroup != 0 || tokens < kGroup) {
      AddHalfPair(lanes, token % kGroup != 0, weights, rows, head_dim, sums, s.dim);
      ++lo;
      continue;
    }
    tile.groups = tokens / kGroup;
    tile.a = weights;
    tile.b = lanes;
    tile.prefetch = tile.groups * tile.b_stride;
    TileRows<Dot>(rows, tile, head_dim);
    lo += tile.groups * kGroup;
  }
}

// Folds the chunk's result into the row's running one.
AS_ALWAYS_INLINE void Merge(const AttentionScratch& s, int64_t row, const float* chunk_sum,
                            ChunkSoftmax chunk) {
  const float old = s.highest[row];
  const float highest = chunk.highest > old ? chunk.highest : old;
  const float shift = highest == kNoScore ? 0.0f : highest;
  const float keep = ExpScalar(old - shift);
  const float take = ExpScalar(chunk.highest - shift);
  s.highest[row] = highest;
  s.denominator[row] = s.denominator[row] * keep + chunk.denominator * take;
  float* sum = s.sum + row * s.dim;
  for (int64_t d = 0; d < s.dim; d += kLanes) {
    const VecF taken = Mul(LoadF(chunk_sum + d), Set1(take));
    StoreF(sum + d, Fma(LoadF(sum + d), Set1(keep), taken));
  }
}

// One chunk for the rows of one register tile.
template <class T, class Dot>
void AttendChunk(const AttentionArgs& args, const CacheHead<T>& head, const AttentionScratch& s,
                 int64_t first_row, int64_t row, int64_t rows, int64_t chunk) {
  KeyRange ranges[kAttentionTileRows];
  ChunkSoftmax softmax[kAttentionTileRows];
  KeyRange all{chunk + kAttentionChunk, chunk};   // what any row sees
  KeyRange both{chunk, chunk + kAttentionChunk};  // what every row sees
  for (int64_t r = 0; r < rows; ++r) {
    const KeyRange visible = VisibleKeys(args, first_row + row + r);
    ranges[r] = {Higher(visible.begin, chunk), Lower(visible.end, chunk + kAttentionChunk)};
    both = {Higher(both.begin, ranges[r].begin), Lower(both.end, ranges[r].end)};
    if (ranges[r].begin >= ranges[r].end) continue;
    all = {Lower(all.begin, ranges[r].begin), Higher(all.end, ranges[r].end)};
  }
  if (all.begin >= all.end) return;
  Scores<T, Dot>(head, s, args.head_dim, row, rows, chunk, all.begin, all.end);
  if (both.begin >= both.end) both = {chunk + kAttentionChunk, chunk + kAttentionChunk};
  for (int64_t r = 0; r < rows; ++r) {
    const KeyRange seen = ranges[r];
    if (seen.begin >= seen.end) continue;
    softmax[r] = Softmax(s.scores + r * kAttentionChunk, seen.begin - chunk, seen.end - chunk,
                         args.scale, args.soft_cap);
    for (int64_t d = 0; d < s.dim; d += kLanes) StoreF(s.chunk_sum + r * s.dim + d, Zero());
    AddValues<T, Dot>(head, s, args.head_dim, r, 1, chunk, seen.begin, Lower(seen.end, both.begin));
  }
  AddValues<T, Dot>(head, s, args.head_dim, 0, rows, chunk, both.begin, both.end);
  for (int64_t r = 0; r < rows; ++r) {
    const KeyRange seen = ranges[r];
    if (seen.begin >= seen.end) continue;
    AddValues<T, Dot>(head, s, args.head_dim, r, 1, chunk, Higher(seen.begin, both.end), seen.end);
    Merge(s, row + r, s.chunk_sum + r * s.dim, softmax[r]);
  }
}

// Up to kAttentionRows rows over all the chunks that any of them sees.
template <class T, class Dot, class Out>
void AttendRows(const AttentionArgs& args, const CacheHead<T>& head, const AttentionScratch& s,
                int64_t first_row, int64_t rows) {
  const int64_t head_dim = args.head_dim;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = args.token_begin + (first_row + r) / args.group;
    const int64_t q_head = args.kv_head * args.group + (first_row + r) % args.group;
    const float* q = args.q + token * args.ldq + q_head * head_dim;
    for (int64_t d = 0; d < s.dim; d += kLanes) {
      StoreF(s.q + r * s.dim + d,
             d < head_dim ? MaskLoadF(FirstLanes(head_dim - d), q + d) : Zero());
      StoreF(s.sum + r * s.dim + d, Zero());
    }
    s.highest[r] = kNoScore;
    s.denominator[r] = 0;
  }
  const int64_t begin = VisibleKeys(args, first_row).begin;
  const int64_t end = VisibleKeys(args, first_row + rows - 1).end;
  for (int64_t chunk = begin / kAttentionChunk * kAttentionChunk; chunk < end;
       chunk += kAttentionChunk) {
    for (int64_t r = 0; r < rows;) {
      const int64_t tile_rows = NextTileRows(rows - r);
      AttendChunk<T, Dot>(args, head, s, first_row, r, tile_rows, chunk);
      r += tile_rows;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = args.token_begin + (first_row + r) / args.group;
    const int64_t q_head = args.kv_head * args.group + (first_row + r) % args.group;
    Out* out = static_cast<Out*>(args.out) + token * args.ldo + q_head * head_dim;
    const VecF denominator = Set1(s.denominator[r]);
    const float* sum = s.sum + r * s.dim;
    ForEachVec(
        head_dim, [&](int64_t i, auto load, auto store) __attribute__((always_inline)) {
          store(out + i, Div(load(sum + i), denominator));
        });
  }
}

template <class T, class Dot, class Out>
void Attention(const AttentionArgs& args, Stream) noexcept {
  const AttentionScratch s = SplitScratch(args.scratch, args.head_dim);
  const CacheHead<T> head = CacheHead<T>::Of(args.kv, args.block_table, args.kv_head);
  const int64_t rows = (args.token_end - args.token_begin) * args.group;
  for (int64_t row = 0; row < rows; row += kAttentionRows) {
    AttendRows<T, Dot, Out>(args, head, s, row, Lower(kAttentionRows, rows - row));
  }
}

}  // namespace
}  // namespace allspark::kernels
