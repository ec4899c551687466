// GEMM over quantised panels, u = q + zero in 8 or 4 bits with a scale per column and group of K.
//
// With int8 activations, the products of a group are summed exactly in int32, so tiles and blocks
// cannot change a bit. A group's sum is then scaled and added to the float32 sum, group by group.
// Activations may have scales for groups of K, too; a group of sums is then the smaller of both.
// With float activations, a block of the panel is widened once, exactly, for all rows that pass
// over it, and the tiles of tile.inl do the rest.
//
// With int8 activations, the zero point is not in the inner loop, since
// sum a (u - zero) = sum a u - zero * sum a. The sums of a come with the activations.
#pragma once

#include "kernels/cpu/bytes.inl"
#include "kernels/cpu/gemm.inl"

namespace allspark::kernels {
namespace {

// Input features per block of the integer path: 64 KiB as bytes, or with few rows 8 KiB as stored
// (for the reason in gemm.inl).
constexpr int64_t kByteBlock = 1024;
template <int kBits>
AS_ALWAYS_INLINE int64_t ByteBlockFor(int64_t rows) {
  return rows > 1 && rows <= kGemmFewRows ? 128 * 8 / kBits : kByteBlock;
}
// Input features per widened block: 16 KiB of bfloat16, 32 of float32.
constexpr int64_t kWideBlock = 128;

// One panel's weights, scales and zero points.
struct QuantPanel {
  const unsigned char* w;
  const uint16_t* scale;  // [groups][64]
  const uint8_t* zero;    // [groups][64] or null
  int64_t columns;        // whole vectors
};

template <int kBits>
AS_ALWAYS_INLINE QuantPanel PanelOf(const GemmArgs& args, int64_t p) {
  const int64_t groups = args.k / args.group_size;
  const int64_t wanted = args.n - p * kPanelColumns;
  const int64_t columns = wanted < kPanelColumns ? wanted : kPanelColumns;
  return {static_cast<const unsigned char*>(args.w) + p * args.k * kPanelColumns * kBits / 8,
          reinterpret_cast<const uint16_t*>(args.scale) + p * groups * kPanelColumns,
          args.zero == nullptr ? nullptr : args.zero + p * groups * kPanelColumns,
          (columns + kLanes - 1) / kLanes * kLanes};
}

// A block of the integer path: `groups` whole groups, or a part of one.
struct ByteBlock {
  const int8_t* a;
  int64_t lda;
  const unsigned char* b;  // [groups * lanes][64] lanes of four bytes, or half as many of nibbles
  int64_t groups, lanes;   // lanes of four k per group, within this block
  bool first, last;        // the group begins, and ends, in this block
  bool fresh;              // c holds no sums before this block's first group
  bool in_registers;       // GroupTile's sums
  const int32_t* a_sums;   // of the first row, the block's first group
  int64_t ld_sums, sums_per_group;
  int64_t index;  // of the first group, from the row's begin
  // Of the panel's first group. A scale belongs to 2^w_shift groups.
  const uint16_t* scale;  // null: a scale for each column, which comes last
  const uint8_t* zero;    // null: all are symmetric_zero
  int32_t symmetric_zero;
  int w_shift;
  // Of the first row, [..][ld_scales]; a scale belongs to 2^a_shift groups. Null: one for each row,
  // which comes last.
  const float* a_scale;
  int64_t ld_scales;
  int a_shift;
  int32_t* partial;  // [rows][64]: a group's sum between its blocks
  float* c;          // [rows][64]
  Fetch fetch;
};

// Where a group's weight scales and zero points begin.
AS_ALWAYS_INLINE int64_t ScaleAt(const ByteBlock& block, int64_t group) {
  return ((block.index + group) >> block.w_shift) * kPanelColumns;
}

template <int kBits, int R, int V>
AS_ALWAYS_INLINE void StartGroup(const ByteBlock& block, int64_t group, VecI (&acc)[R][V]) {
  constexpr int32_t kBias = kBits == 8 ? kByteBias : 0;
  AS_UNROLL for (int r = 0; r < R; ++r) {
    const int32_t* sums = block.a_sums + r * block.ld_sums + group * block.sums_per_group;
    int32_t sum = 0;
    for (int64_t i = 0; i < block.sums_per_group; ++i) sum -= sums[i];
    AS_UNROLL for (int v = 0; v < V; ++v) {
      acc[r][v] = block.zero == nullptr
                      ? Set1Int(sum * (block.symmetric_zero - kBias))
                      : MulInt(SubInt(LoadBytes(block.zero + ScaleAt(block, group) + v * kLanes),
                                      Set1Int(kBias)),
                               Set1Int(sum));
    }
  }
}

// Adds a group's scaled sums to those before it, which are where get(r, v) reads and put(r, v, x)
// writes them.
template <int R, int V, class Get, class Put>
AS_ALWAYS_INLINE void AddGroup(const ByteBlock& block, int64_t group, const VecI (&acc)[R][V],
                               const Get& get, const Put& put) {
  const bool scales_columns = block.scale != nullptr, scales_rows = block.a_scale != nullptr;
  const uint16_t* at = block.scale + (scales_columns ? ScaleAt(block, group) : 0);
  const float* a_scale = block.a_scale + (scales_rows ? (block.index + group) >> block.a_shift : 0);
  const int64_t ld_scales = block.ld_scales;
  VecF scale[V];
  AS_UNROLL for (int v = 0; v < V; ++v) {
    scale[v] = scales_columns ? LoadBf16(at + v * kLanes) : Zero();
  }
  AS_UNROLL for (int r = 0; r < R; ++r) {
    const VecF row = scales_rows ? Set1(a_scale[r * ld_scales]) : Zero();
    AS_UNROLL for (int v = 0; v < V; ++v) {
      const VecF before = get(r, v);
      const VecF x = IntToFloat(acc[r][v]);
      put(r, v,
          !scales_rows      ? Fma(x, scale[v], before)
          : !scales_columns ? Fma(x, row, before)
                            : Fma(Mul(x, row), scale[v], before));
    }
  }
}

// The same for sums in block.c.
template <int R, int V>
AS_ALWAYS_INLINE void AddGroupInMemory(const ByteBlock& block, int64_t group,
                                       const VecI (&acc)[R][V]) {
  const bool fresh = block.fresh && group == 0;
  float* c = block.c;
  AddGroup<R, V>(
      block, group, acc,
      [&](int r, int v) __attribute__((always_inline)) {
        return fresh ? Zero() : LoadF(c + r * kPanelColumns + v * kLanes);
      },
      [&](int r, int v, VecF x)
          __attribute__((always_inline)) { StoreF(c + r * kPanelColumns + v * kLanes, x); });
}

// Adds the products of one stored lane: 4 k, or 8 of nibbles.
template <int kBits, int R, int V>
AS_ALWAYS_INLINE void DotLane(const int8_t* a, int64_t lda, const unsigned char* b,
                              VecI (&acc)[R][V]) {
  VecI u[V];
  AS_UNROLL for (int v = 0; v < V; ++v) {
    u[v] = LoadI(b + v * kVecBytes);
    u[v] = kBits == 4 ? LowNibbles(u[v]) : BiasBytes(u[v]);
  }
  AS_UNROLL for (int r = 0; r < R; ++r) {
    const ByteRow x = BroadcastBytes(a + r * lda);
    AS_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = DotBytes(acc[r][v], u[v], x);
  }
  if constexpr (kBits == 4) {
    AS_UNROLL for (int v = 0; v < V; ++v) u[v] = HighNibbles(LoadI(b + v * kVecBytes));
    AS_UNROLL for (int r = 0; r < R; ++r) {
      const ByteRow x = BroadcastBytes(a + r * lda + 4);
      AS_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = DotBytes(acc[r][v], u[v], x);
    }
  }
}

// Adds a group's products, from `a` and `b` on, which then point behind them.
template <int kBits, int R, int V>
AS_ALWAYS_INLINE void DotGroup(const ByteBlock& block, const int8_t*& a, const unsigned char*& b,
                               Fetch& fetch, VecI (&acc)[R][V]) {
  constexpr int64_t kStep = kBits == 8 ? 4 : 8;  // k per stored lane
  for (int64_t k = 0; k < block.lanes * 4; k += kStep) {
    FetchStep<V>(fetch);
    DotLane<kBits, R, V>(a, block.lda, b, acc);
    a += kStep;
    b += kPanelStride;
  }
}

// R rows by V vectors of columns, over whole groups. The scaled sums stay in registers.
template <int kBits, int R, int V>
void GroupTile(const ByteBlock& block) {
  const int8_t* a = block.a;
  const unsigned char* b = block.b;
  Fetch fetch = block.fetch;
  VecF sum[R][V];
  AS_UNROLL for (int r = 0; r < R; ++r) {
    AS_UNROLL for (int v = 0; v < V; ++v) {
      sum[r][v] = block.fresh ? Zero() : LoadF(block.c + r * kPanelColumns + v * kLanes);
    }
  }
  for (int64_t group = 0; group < block.groups; ++group) {
    VecI acc[R][V];
    StartGroup<kBits, R, V>(block, group, acc);
    DotGroup<kBits, R, V>(block, a, b, fetch, acc);
    AddGroup<R, V>(
        block, group, acc, [&](int r, int v) __attribute__((always_inline)) { return sum[r][v]; },
        [&](int r, int v, VecF x) __attribute__((always_inline)) { sum[r][v] = x; });
  }
  AS_UNROLL for (int r = 0; r < R; ++r) {
    AS_UNROLL for (int v = 0; v < V; ++v) {
      StoreF(block.c + r * kPanelColumns + v * kLanes, sum[r][v]);
    }
  }
}

// The same over any groups. Between groups the scaled sums are in memory, and between blocks also
// the integers of a group.
template <int kBits, int R, int V>
void ByteTile(const ByteBlock& block) {
  const int8_t* a = block.a;
  const unsigned char* b = block.b;
  Fetch fetch = block.fetch;
  for (int64_t group = 0; group < block.groups; ++group) {
    VecI acc[R][V];
    if (block.first) {
      StartGroup<kBits, R, V>(block, group, acc);
    } else {
      AS_UNROLL for (int r = 0; r < R; ++r) {
        AS_UNROLL for (int v = 0; v < V; ++v) {
          acc[r][v] = LoadI(block.partial + r * kPanelColumns + v * kLanes);
        }
      }
    }
    DotGroup<kBits, R, V>(block, a, b, fetch, acc);
    if (block.last) {
      AddGroupInMemory<R, V>(block, group, acc);
    } else {
      AS_UNROLL for (int r = 0; r < R; ++r) {
        AS_UNROLL for (int v = 0; v < V; ++v) {
          StoreI(block.partial + r * kPanelColumns + v * kLanes, acc[r][v]);
        }
      }
    }
  }
}

// Group tiles have half the columns of others, so that registers hold both sums: a twentieth faster
// on a Zen 4, where columns have a single scale. Few rows stream their weights, and would read each
// panel twice.
constexpr bool kHasGroupTiles = kLanes == 16;
constexpr int GroupVecs(int rows) { return rows <= 3 ? TileVecs(rows) : TileVecs(rows) / 2; }

// Vectors of columns of a tile of up to kTileRows rows.
AS_ALWAYS_INLINE int ByteTileVecs(const ByteBlock& block, int64_t rows) {
  const int count = static_cast<int>(rows);
  return kHasGroupTiles && block.in_registers && rows <= kTileRows ? GroupVecs(count)
                                                                   : TileVecs(count);
}

template <int kBits, int R, int V, bool kGroups>
AS_ALWAYS_INLINE void ByteTileColumns(ByteBlock& block, int64_t& columns) {
  while (columns >= V * kLanes) {
    if constexpr (kGroups) {
      GroupTile<kBits, R, V>(block);
    } else {
      ByteTile<kBits, R, V>(block);
    }
    block.fetch.at += block.groups * block.lanes * kBits / 8 * block.fetch.step;
    block.b += V * kVecBytes;
    block.c += V * kLanes;
    block.partial += V * kLanes;
    if (block.scale != nullptr) block.scale += V * kLanes;
    if (block.zero != nullptr) block.zero += V * kLanes;
    columns -= V * kLanes;
  }
  if constexpr (V > 1) ByteTileColumns<kBits, R, V / 2, kGroups>(block, columns);
}

template <int kBits, int R>
AS_ALWAYS_INLINE void ByteTilesOf(ByteBlock& block, int64_t& columns) {
  if constexpr (kHasGroupTiles) {
    if (block.in_registers) {
      return ByteTileColumns<kBits, R, GroupVecs(R), true>(block, columns);
    }
  }
  ByteTileColumns<kBits, R, TileVecs(R), false>(block, columns);
}

template <int kBits>
void ByteTileRows(int64_t rows, ByteBlock block, int64_t columns) {
  static_assert(kTileRows == 6);
  switch (rows) {
    case 1:
      return ByteTilesOf<kBits, 1>(block, columns);
    case 2:
      return ByteTilesOf<kBits, 2>(block, columns);
    case 3:
      return ByteTilesOf<kBits, 3>(block, columns);
    case 4:
      return ByteTilesOf<kBits, 4>(block, columns);
    case 5:
      return ByteTilesOf<kBits, 5>(block, columns);
    default:
      return ByteTilesOf<kBits, 6>(block, columns);
  }
}

// Nibbles to bytes, for blocks that many rows pass over.
AS_ALWAYS_INLINE void SpreadNibbles(const unsigned char* b, int64_t lanes, unsigned char* out) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    for (int64_t line = 0; line < kPanelStride; line += kVecBytes) {
      const VecI x = LoadI(b + line);
      StoreI(out + line, LowNibbles(x));
      StoreI(out + kPanelStride + line, HighNibbles(x));
    }
    b += kPanelStride;
    out += 2 * kPanelStride;
  }
}

// Computes a block's rows in tiles: Tiles::NextRows gives a tile's rows, Tiles::Rows computes it.
template <int kBits, class Tiles>
AS_ALWAYS_INLINE void ByteTilesOver(ByteBlock block, int64_t rows, int64_t columns,
                                    const unsigned char* next, int64_t bytes,
                                    const Destination& destination) {
  const int64_t steps = block.groups * block.lanes * kBits / 8;
  for (int64_t r = 0; r < rows;) {
    const int64_t tile_rows = Tiles::NextRows(rows - r, block.lanes);
    block.fetch = rows == 1 ? Fetch{block.b + kStreamPrefetch, kPanelStride}
                            : FetchShare(next, bytes, rows, r, tile_rows, steps, columns,
                                         ByteTileVecs(block, tile_rows));
    destination.FetchRows(r, tile_rows);
    Tiles::template Rows<kBits>(tile_rows, block, columns);
    block.a += tile_rows * block.lda;
    block.a_sums += tile_rows * block.ld_sums;
    if (block.a_scale != nullptr) block.a_scale += tile_rows * block.ld_scales;
    block.c += tile_rows * kPanelColumns;
    block.partial += tile_rows * kPanelColumns;
    r += tile_rows;
  }
}

// Tiles that use DotBytes (bytes.inl).
struct ByteTiles {
  // Whether nibbles are spread to bytes before this many rows pass over a block.
  AS_ALWAYS_INLINE bool Spreads(int64_t rows) { return rows > kTileRows; }

  AS_ALWAYS_INLINE int64_t NextRows(int64_t left, int64_t) {
    return TileShape<ByteTiles>::NextRows(left);
  }

  template <int kBits>
  AS_ALWAYS_INLINE void Rows(int64_t rows, const ByteBlock& block, int64_t columns) {
    ByteTileRows<kBits>(rows, block, columns);
  }
};

// The k of one exact sum.
AS_ALWAYS_INLINE int64_t SumGroup(const GemmArgs& args) {
  return args.a_scale_group > 0 && args.a_scale_group < args.group_size ? args.a_scale_group
                                                                        : args.group_size;
}

// How many groups of sums, as a power of two, share a scale that belongs to `scale_group` of k.
AS_ALWAYS_INLINE int SharedBy(int64_t scale_group, int64_t group) {
  int shift = 0;
  while (group << shift < scale_group) ++shift;
  return shift;
}

template <int kBits, class Tiles>
void GemmBytesRows(const GemmArgs& args, const QuantPanel& panel, int64_t row_begin, int64_t rows,
                   int32_t* partial, unsigned char* spread, float* c,
                   const Destination& destination) {
  const int64_t group = SumGroup(args);
  const bool has_column_scales = args.group_size == args.k;
  const bool has_row_scales = args.a_scale_group == 0;
  const int64_t features = ByteBlockFor<kBits>(rows);
  const int64_t whole_groups = features / group;  // 0: a group takes several blocks
  ByteBlock block;
  block.lda = args.lda;
  block.ld_sums = RowSums(args.k);
  block.sums_per_group = group == args.k ? 1 : group / kSumBlock;
  block.partial = partial;
  block.c = c;
  block.scale = has_column_scales && !has_row_scales ? nullptr : panel.scale;
  block.in_registers = block.scale == nullptr && rows > kGemmFewRows && whole_groups > 0;
  block.zero = panel.zero;
  block.symmetric_zero = SymmetricZero(kBits);
  // A column's only zero point belongs to all groups, however many.
  block.w_shift = has_column_scales ? 62 : SharedBy(args.group_size, group);
  block.ld_scales = RowScales(args.k, args.a_scale_group);
  block.a_scale = has_row_scales ? nullptr : args.a_scale + row_begin * block.ld_scales;
  block.a_shift = has_row_scales ? 0 : SharedBy(args.a_scale_group, group);
  const int32_t* sums = args.a_sums + row_begin * block.ld_sums;
  for (int64_t k = 0, next; k < args.k; k = next) {
    const int64_t index = k / group;
    const int64_t end = whole_groups > 0                     ? k + whole_groups * group
                        : k + features < (index + 1) * group ? k + features
                                                             : (index + 1) * group;
    next = end < args.k ? end : args.k;
    block.groups = whole_groups > 0 ? (next - k) / group : 1;
    block.lanes = (next - k) / block.groups / 4;
    block.first = k % group == 0;
    block.last = next % group == 0;
    block.fresh = index == 0;
    block.index = index;
    block.a = static_cast<const int8_t*>(args.a) + row_begin * args.lda + k;
    block.b = panel.w + k * kPanelColumns * kBits / 8;
    // The sum of a whole row is the last one.
    block.a_sums = sums + (group == args.k ? block.ld_sums - 1 : k / kSumBlock);
    const int64_t bytes = (next - k) * kPanelColumns * kBits / 8;
    const Destination fetched = k == 0 ? destination : Destination{};
    if (kBits == 8 || !Tiles::Spreads(rows)) {
      ByteTilesOver<kBits, Tiles>(block, rows, panel.columns, block.b + bytes, bytes, fetched);
      continue;
    }
    const unsigned char* next_block = block.b + bytes;
    SpreadNibbles(block.b, (next - k) / 8, spread);
    block.b = spread;
    // The weights are bytes now, but their zero point is still that of nibbles.
    ByteTilesOver<8, Tiles>(block, rows, panel.columns, next_block, bytes, fetched);
  }
  if (block.scale != nullptr) return;
  for (int64_t i = 0; i < panel.columns; i += kLanes) {
    const VecF scale = LoadBf16(panel.scale + i);
    for (int64_t r = 0; r < rows; ++r) {
      float* sum = c + r * kPanelColumns + i;
      StoreF(sum, Mul(LoadF(sum), scale));
    }
  }
}

template <int kBits, class Tiles = ByteTiles>
struct GemmBytes {
  template <class Store>
  AS_ALWAYS_INLINE void Run(const GemmArgs& args, const Store& store) {
    alignas(64) int32_t partial[kGemmRows * kPanelColumns];
    alignas(64) unsigned char spread[kBits == 4 ? kByteBlock * kPanelColumns : 1];
    ForEachRowBlock(
        args, store,
        [&](int64_t p, int64_t row, int64_t rows, float* sums, const Destination& destination) {
          GemmBytesRows<kBits, Tiles>(args, PanelOf<kBits>(args, p), row, rows, partial, spread,
                                      sums, destination);
        });
  }
};

// 2^23, as bits and as a float. Adding an integer u < 2^23 to the bits gives the float 2^23 + u.
constexpr int32_t kMagicBits = 0x4b000000;
constexpr float kMagic = 0x1p23f;

// The element at bit `kShift` of every stored lane, less its zero point, as float32: exact.
// `magic_zero` is kMagic + zero.
template <int kBits, int kShift>
AS_ALWAYS_INLINE VecF Widen(VecI lanes, VecF magic_zero) {
  const VecI u = And(ShiftRight<kShift>(lanes), Set1Int((1 << kBits) - 1));
  return Sub(AsFloat(Or(u, Set1Int(kMagicBits))), magic_zero);
}

// Stores the widened elements k and k + 1 of a lane as the tile reads them.
AS_ALWAYS_INLINE void StoreWide(DotFloat, unsigned char* out, VecF even, VecF odd) {
  StoreF(reinterpret_cast<float*>(out), even);
  StoreF(reinterpret_cast<float*>(out + kPanelStride), odd);
}
// Integers of magnitude below 256 are exact in bfloat16.
template <class Dot>
AS_ALWAYS_INLINE void StoreWide(Dot, unsigned char* out, VecF even, VecF odd) {
  StoreI(out, Or(ShiftRight<16>(AsInt(even)), And(AsInt(odd), Set1Int(-65536))));
}

// Widens `count` k of a panel to [count / Dot::kGroup][64] lanes, and fetches the data after them.
template <int kBits, class Dot>
void WidenBlock(const unsigned char* from, const uint8_t* zeros, int64_t count,
                unsigned char* out) {
  constexpr int64_t kStep = 32 / kBits;                      // k per stored lane
  constexpr int64_t kPair = 2 / Dot::kGroup * kPanelStride;  // bytes of two k
  constexpr int kVecs = kPanelStride / kVecBytes;
  VecF zero[kVecs];
  AS_UNROLL for (int v = 0; v < kVecs; ++v) {
    const VecI point =
        zeros == nullptr ? Set1Int(SymmetricZero(kBits)) : LoadBytes(zeros + v * kLanes);
    zero[v] = Add(Set1(kMagic), IntToFloat(point));
  }
  for (int64_t k = 0; k < count; k += kStep) {
    AS_UNROLL for (int v = 0; v < kVecs; ++v) {
      const unsigned char* lanes = from + v * kVecBytes;
      unsigned char* to = out + v * kVecBytes;
      Prefetch(lanes + kStreamPrefetch);
      const VecI x = LoadI(lanes);
      if constexpr (kBits == 8) {
        StoreWide(Dot(), to, Widen<8, 0>(x, zero[v]), Widen<8, 8>(x, zero[v]));
        StoreWide(Dot(), to + kPair, Widen<8, 16>(x, zero[v]), Widen<8, 24>(x, zero[v]));
      } else {
        StoreWide(Dot(), to, Widen<4, 0>(x, zero[v]), Widen<4, 8>(x, zero[v]));
        StoreWide(Dot(), to + kPair, Widen<4, 16>(x, zero[v]), Widen<4, 24>(x, zero[v]));
        StoreWide(Dot(), to + 2 * kPair, Widen<4, 4>(x, zero[v]), Widen<4, 12>(x, zero[v]));
        StoreWide(Dot(), to + 3 * kPair, Widen<4, 20>(x, zero[v]), Widen<4, 28>(x, zero[v]));
      }
    }
    from += kPanelStride;
    out += kStep / 2 * kPair;
  }
}

template <class Element, class Dot, int kBits>
void GemmWidenedRows(const GemmArgs& args, const QuantPanel& panel, int64_t row_begin, int64_t rows,
                     unsigned char* wide, float* partial, float* c,
                     const Destination& destination) {
  alignas(64) float gathered[kTileRows * kWideBlock];
  for (int64_t k = 0, next; k < args.k; k = next) {
    const int64_t index = k / args.group_size;
    const int64_t group_end = (index + 1) * args.group_size;
    next = k + kWideBlock < group_end ? k + kWideBlock : group_end;
    const uint8_t* zero = panel.zero == nullptr ? nullptr : panel.zero + index * kPanelColumns;
    WidenBlock<kBits, Dot>(panel.w + k * kPanelColumns * kBits / 8, zero, next - k, wide);
    TileArgs<typename Dot::A> tile;
    tile.groups = (next - k) / Dot::kGroup;
    tile.b = wide;
    tile.b_stride = kPanelStride;
    tile.ldc = kPanelColumns;
    tile.resume = k % args.group_size != 0;
    tile.fetch = {wide, 0};
    for (int64_t r = 0; r < rows;) {
      const int64_t tile_rows = TileShape<Dot>::NextRows(rows - r);
      const Element* a = static_cast<const Element*>(args.a) + (row_begin + r) * args.lda + k;
      PlaceRows<Element, Dot>(a, args.lda, tile_rows, gathered, &tile);
      tile.c = partial + r * kPanelColumns;
      if (k == 0) destination.FetchRows(r, tile_rows);
      TileRows<Dot>(tile_rows, tile, panel.columns);
      r += tile_rows;
    }
    if (next != group_end) continue;
    for (int64_t i = 0; i < kPanelColumns; i += kLanes) {
      const VecF scale = LoadBf16(panel.scale + index * kPanelColumns + i);
      for (int64_t r = 0; r < rows; ++r) {
        float* sum = c + r * kPanelColumns + i;
        StoreF(sum, Fma(LoadF(partial + r * kPanelColumns + i), scale, LoadF(sum)));
      }
    }
  }
}

// Element: how A is stored.
template <class Element, class Dot, int kBits>
struct GemmWidened {
  template <class Store>
  AS_ALWAYS_INLINE void Run(const GemmArgs& args, const Store& store) {
    alignas(64) float partial[kGemmRows * kPanelColumns] = {};
    alignas(64) unsigned char wide[kWideBlock / Dot::kGroup * kPanelStride];
    ForEachRowBlock(
        args, store,
        [&](int64_t p, int64_t row, int64_t rows, float* sums, const Destination& destination) {
          for (int64_t i = 0; i < rows * kPanelColumns; i += kLanes) StoreF(sums + i, Zero());
          GemmWidenedRows<Element, Dot, kBits>(args, PanelOf<kBits>(args, p), row, rows, wide,
                                               partial, sums, destination);
        });
  }
};

// Rows of a packed quantised table.
template <int kBits>
void EmbeddingQuantized(const EmbeddingArgs& args, Stream) noexcept {
  constexpr int64_t kStep = 32 / kBits;
  const int64_t groups = args.cols / args.group_size;
  for (int64_t r = 0; r < args.rows; ++r) {
    const int64_t panel = args.ids[r] / kPanelColumns, column = args.ids[r] % kPanelColumns;
    const unsigned char* w = static_cast<const unsigned char*>(args.table) +
                             panel * args.cols * kPanelColumns * kBits / 8 + column * kLaneBytes;
    for (int64_t i = 0; i < args.cols; ++i) {
      const unsigned char* lane = w + i / kStep * kPanelStride;
      const int64_t at = i % kStep;
      const int32_t u = kBits == 8 ? lane[at] : at < 4 ? lane[at] & 15 : lane[at - 4] >> 4;
      const int64_t group = (panel * groups + i / args.group_size) * kPanelColumns + column;
      const int32_t zero = args.zero == nullptr ? SymmetricZero(kBits) : args.zero[group];
      args.out[r * args.ldo + i] = static_cast<float>(u - zero) * ToFloat(args.scale[group]);
    }
  }
}

}  // namespace
}  // namespace allspark::kernels
