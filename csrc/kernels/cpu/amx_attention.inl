// Attention over a bfloat16 cache on AMX. The cache's layouts are those of a tile of B: 16 tokens
// of keys by 32 dimensions, 32 tokens of values by 16 dimensions. Values are added in steps of 32
// tokens from the chunk's beginning. A step that a row sees in part has zeros in the place of the
// other values and weights, so what memory holds there does not matter.
#pragma once

#include "kernels/cpu/amx.inl"
#include "kernels/cpu/attention.inl"

namespace allspark::kernels {
namespace {

// bfloat16 queries, weights, keys and values, for heads of whole steps.
struct DotTiles {
  using A = uint16_t;
  static constexpr int64_t kGroup = 2;
};
constexpr int64_t kTileStep = 32;  // dimensions, or tokens

template <>
struct AttentionTileShape<DotTiles> {
  static constexpr int64_t kMostRows = kAmxPairRows;
  static AS_ALWAYS_INLINE int64_t NextRows(int64_t left) { return Lower(left, kAmxPairRows); }
};

// The lines of a granule of another span. dims: head_dim.
static AS_ALWAYS_INLINE void FetchGranule(const Ahead& ahead, int64_t granule, int64_t dims) {
  for (int64_t line = 0; line < dims / 2; ++line) {
    PrefetchStream(ahead.granule[granule] + line * ahead.step);
  }
}

// Tiles are always whole: the scratch memory has kAttentionRows rows, and what is computed for rows
// beyond the last is not read.
template <>
void ScoreRows<DotTiles, WideLanes>(int64_t rows, const ScoreTileArgs<uint16_t>& args) {
  const bool two = rows > kAmxRows;
  // 32 rows by 32 tokens, or 16 by 64.
  const int64_t columns = two ? 2 * kGranule : 4 * kGranule;
  const int64_t a_stride = args.lda * 2, c_stride = args.ldc * 4, stride = args.keys->stride;
  const auto* const a = reinterpret_cast<const unsigned char*>(args.a);
  for (int64_t i = args.begin / columns * columns; i < args.end; i += columns) {
    const int64_t granule = i / kGranule;
    for (int64_t g = granule; g < granule + columns / kGranule; ++g) {
      if ((args.fetched >> g & 1) != 0) FetchGranule(*args.ahead, g, args.groups * 2);
    }
    const unsigned char* const* b = args.keys->granule + granule;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < args.groups / kAmxGroups; ++step) {
      const int64_t at = step * kAmxGroups * stride;
      _tile_loadd(4, a + step * kAmxLine, a_stride);
      _tile_loadd(6, b[0] + at, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b[1] + at, stride);
      _tile_dpbf16ps(1, 4, 7);
      if (two) {
        _tile_loadd(5, a + kAmxRows * a_stride + step * kAmxLine, a_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      } else {
        _tile_loadd(6, b[2] + at, stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, b[3] + at, stride);
        _tile_dpbf16ps(3, 4, 7);
      }
    }
    auto* const c = reinterpret_cast<unsigned char*>(args.c + i);
    unsigned char* const second = two ? c + kAmxRows * c_stride : c + 2 * kAmxLine;
    _tile_stored(0, c, c_stride);
    _tile_stored(1, c + kAmxLine, c_stride);
    _tile_stored(2, second, c_stride);
    _tile_stored(3, second + kAmxLine, c_stride);
  }
  __asm__ volatile("" ::: "memory");  // as in AmxConfigure
}

template <>
struct ChunkValues<DotTiles> {
  static constexpr int64_t kSpans = kAttentionChunk / kSpan;
  static constexpr int64_t kSpanSteps = kSpan / kTileStep;

  // Of one chunk.
  struct Operands {
    const AttentionScratch& s;
    int64_t head_dim, chunk;
    Span values[kSpans];
    Ahead next_keys[kSpans];
    bool fetches[kSpans];
    // A tile of values that do not lie as tiles are loaded.
    alignas(64) unsigned char copy[kAmxTileBytes];

    unsigned char* Weights(int64_t row) const {
      return reinterpret_cast<unsigned char*>(s.scores + row * kAttentionChunk);
    }
    float* Sums(int64_t row) const { return s.chunk_sum + row * s.dim; }
    // The positions of a step.
    KeyRange Step(int64_t step) const {
      return {chunk + step * kTileStep, chunk + (step + 1) * kTileStep};
    }
    const unsigned char* Granule(int64_t step, int64_t half) const {
      return values[step / kSpanSteps].granule[step % kSpanSteps * 2 + half];
    }
    int64_t Stride() const { return head_dim * kLaneBytes; }
    bool IsTile(int64_t step) const {
      return Granule(step, 1) == Granule(step, 0) + kGranule / 2 * Stride();
    }
    // 16 dimensions of a step's values, with zeros instead of those outside of `range`.
    void CopyTile(int64_t step, int64_t dim, KeyRange range) {
      const int64_t begin = Step(step).begin;
      for (int64_t g = 0; g < kAmxGroups; ++g) {
        const int64_t position = begin + 2 * g, in_half = g % (kGranule / 2);
        const unsigned char* from = Granule(step, g / (kGranule / 2)) + in_half * Stride();
        const bool even = position >= range.begin && position < range.end;
        const bool odd = position + 1 >= range.begin && position + 1 < range.end;
        const uint32_t mask = (even ? 0xffffu : 0u) | (odd ? 0xffff0000u : 0u);
        const VecI lanes = LoadI(from + dim * kLaneBytes);
        StoreI(copy + g * kAmxLine, And(lanes, Set1Int(static_cast<int32_t>(mask))));
      }
    }
  };

  template <class Head, class Lanes>
  static void Sum(const AttentionArgs& args, const Head& head, const AttentionScratch& s,
                  const RowBlock& rows, int64_t chunk, KeyRange seen, const NextKeys<Head>& next) {
    Operands x{s, args.head_dim, chunk, {}, {}, {}, {}};
    for (int64_t i = 0; i < kSpans; ++i) {
      const int64_t begin = chunk + i * kSpan;
      const KeyRange span = Intersect(seen, {begin, begin + kSpan});
      if (Empty(span)) continue;
      x.values[i] = head.template Values<Lanes>({begin, span.begin, span.end}, s.staging);
      x.fetches[i] = next.At(begin - chunk, &x.next_keys[i]);
    }
    for (int64_t i = 0; i < rows.count * s.dim; i += kLanes) StoreF(s.chunk_sum + i, Zero());
    const int64_t first = (seen.begin - chunk) / kTileStep;
    const int64_t last = CeilDiv(seen.end - chunk, kTileStep);
    for (int64_t r = 0; r < rows.count; r += kAmxPairRows) {
      const int64_t end = Lower(r + kAmxPairRows, rows.count);
      // The steps that all of these rows see whole: of a row, the range ends before, and begins
      // after, those of the rows before it.
      const KeyRange common{rows.visible[end - 1].begin, rows.visible[r].end};
      const auto whole = [&](int64_t step) { return Covers(common, x.Step(step)); };
      int64_t step = first;
      for (; step < last && !whole(step); ++step) AddParts(x, rows, r, end, step);
      const int64_t begin = step;
      while (step < last && whole(step)) ++step;
      if (step > begin) AddSteps(x, r, end - r, begin, step);
      for (; step < last; ++step) AddParts(x, rows, r, end, step);
    }
    __asm__ volatile("" ::: "memory");  // as in AmxConfigure
  }

 private:
  // The tile of 16 dimensions of a step whose values all are seen.
  static AS_ALWAYS_INLINE const unsigned char* TileOf(Operands& x, int64_t step, int64_t dim,
                                                      int64_t* stride) {
    if (x.IsTile(step)) {
      *stride = x.Stride();
      return x.Granule(step, 0) + dim * kLaneBytes;
    }
    x.CopyTile(step, dim, x.Step(step));
    __asm__ volatile("" ::: "memory");
    *stride = kAmxLine;
    return x.copy;
  }

  // Steps [begin, end) of rows [row, row + count), 32 dimensions at a time.
  static void AddSteps(Operands& x, int64_t row, int64_t count, int64_t begin, int64_t end) {
    const bool two = count > kAmxRows;
    const int64_t c_stride = x.s.dim * 4, a_stride = kAttentionChunk * 4;
    const unsigned char* const a = x.Weights(row);
    for (int64_t dim = 0; dim < x.head_dim; dim += kTileStep) {
      auto* const c = reinterpret_cast<unsigned char*>(x.Sums(row) + dim);
      unsigned char* const below = c + kAmxRows * c_stride;
      _tile_loadd(0, c, c_stride);
      _tile_loadd(1, c + kAmxLine, c_stride);
      if (two) {
        _tile_loadd(2, below, c_stride);
        _tile_loadd(3, below + kAmxLine, c_stride);
      }
      for (int64_t step = begin; step < end; ++step) {
        if (row == 0 && dim == 0 && x.fetches[step / kSpanSteps]) {
          const Ahead& ahead = x.next_keys[step / kSpanSteps];
          FetchGranule(ahead, step % kSpanSteps * 2, x.head_dim);
          FetchGranule(ahead, step % kSpanSteps * 2 + 1, x.head_dim);
        }
        int64_t stride;
        _tile_loadd(4, a + step * kAmxLine, a_stride);
        if (two) _tile_loadd(5, a + kAmxRows * a_stride + step * kAmxLine, a_stride);
        const unsigned char* b = TileOf(x, step, dim, &stride);
        _tile_loadd(6, b, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (two) _tile_dpbf16ps(2, 5, 6);
        b = TileOf(x, step, dim + kAmxColumns, &stride);
        _tile_loadd(7, b, stride);
        _tile_dpbf16ps(1, 4, 7);
        if (two) _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, c, c_stride);
      _tile_stored(1, c + kAmxLine, c_stride);
      if (two) {
        _tile_stored(2, below, c_stride);
        _tile_stored(3, below + kAmxLine, c_stride);
      }
    }
    __asm__ volatile("" ::: "memory");
  }

  // A step of rows [begin, end), some of which see it in part or not at all.
  static void AddParts(Operands& x, const RowBlock& rows, int64_t begin, int64_t end,
                       int64_t step) {
    const KeyRange whole = x.Step(step);
    for (int64_t i = begin, next; i < end; i = next) {
      const KeyRange range = Intersect(rows.visible[i], whole);
      // Rows that see the same, and are in one tile. The tile may begin with rows before them.
      const int64_t base = Lower(i, kAttentionRows - kAmxRows);
      for (next = i + 1; next < Lower(end, base + kAmxRows); ++next) {
        const KeyRange other = Intersect(rows.visible[next], whole);
        if (other.begin != range.begin || other.end != range.end) break;
      }
      if (Empty(range)) continue;
      for (int64_t row = i; row < next; ++row) {
        auto* const weights = reinterpret_cast<uint16_t*>(x.Weights(row));
        for (int64_t p = whole.begin; p < range.begin; ++p) weights[p - x.chunk] = 0;
        for (int64_t p = range.end; p < whole.end; ++p) weights[p - x.chunk] = 0;
      }
      AddPart(x, base, i, next, step, range);
    }
  }

  // A step of rows [begin, end), which see `range` of it, in a tile whose first row is `base`.
  static void AddPart(Operands& x, int64_t base, int64_t begin, int64_t end, int64_t step,
                      KeyRange range) {
    alignas(64) float sums[kAmxRows * kAmxColumns];
    __asm__ volatile("" ::: "memory");
    _tile_loadd(4, x.Weights(base) + step * kAmxLine, kAttentionChunk * 4);
    for (int64_t dim = 0; dim < x.head_dim; dim += kAmxColumns) {
      x.CopyTile(step, dim, range);
      __asm__ volatile("" ::: "memory");
      _tile_loadd(0, x.Sums(base) + dim, x.s.dim * 4);
      _tile_loadd(6, x.copy, kAmxLine);
      _tile_dpbf16ps(0, 4, 6);
      _tile_stored(0, sums, kAmxLine);
      __asm__ volatile("" ::: "memory");
      for (int64_t row = begin; row < end; ++row) {
        StoreF(x.Sums(row) + dim, LoadF(sums + (row - base) * kAmxColumns));
      }
    }
  }
};

// On tiles where the head is of whole steps, otherwise with the dot product of vectors.
template <class Out>
void AttentionOnAmx(const AttentionArgs& args) noexcept {
  using Head = CacheHead<uint16_t>;
  if (args.head_dim % kTileStep != 0) return Attention<Head, DotNative, Out>(args);
  const AmxSession session;
  AmxConfigure(kAmxPairRows, kAmxGroups);
  Attention<Head, DotTiles, Out>(args);
}

}  // namespace
}  // namespace allspark::kernels
