// GEMM over quantised panels with int8 activations: stored integers u with a scale, and perhaps a
// zero point or an offset, per column and group of K (WeightScales in ../args.h). widened.inl, for
// float activations, shares the panels, their scales and offsets.
//
// The products of a group are summed exactly in int32, so tiles and blocks cannot change a bit. A
// group's sum is then scaled and added to the float32 sum, group by group. Activations may have
// scales for groups of K, too; a group of sums is then the smaller of both.
//
// The zero point is not in the inner loop, since sum a (u - zero) = sum a u - zero * sum a. The
// sums of a come with the activations. Offsets take the same sums, scaled.
#pragma once

#include "kernels/cpu/bytes.inl"
#include "kernels/cpu/gemm.inl"
#include "kernels/cpu/pairs16.inl"
#include "kernels/cpu/stored_forms.inl"

namespace allspark::kernels {
namespace {

// Input features per block of the integer path: 64 KiB as bytes, or with few rows 16 KiB as stored
// (for the reason in gemm.inl).
constexpr int64_t kByteBlock = 1024;
// From one widened row to the next (WidensRows): a line more, so that rows do not share their cache
// sets.
constexpr int64_t kWidenedStride = 2 * kByteBlock + 64;
template <Form kForm>
static AS_ALWAYS_INLINE int64_t ByteBlockFor(int64_t rows) {
  constexpr int64_t kFew = kForm == Form::kSixBits ? 256 : (16 << 10) / LowBytes(kForm);
  return rows > 1 && rows <= kGemmFewRows ? kFew : kByteBlock;
}

// A panel's scales or offsets as they are stored (WeightScales).
struct PanelScales {
  const unsigned char* at;  // [groups][64]; null: none
  const uint16_t* blocks;   // of ScaleType::kCode
  ScaleType type;
  int block_shift;  // a block has 2^block_shift groups
};

// Of one group, V vectors from `column` on.
template <int V>
static AS_ALWAYS_INLINE void LoadScales(const PanelScales& scales, int64_t group, int64_t column,
                                        VecF (&out)[V]) {
  const int64_t first = group * kPanelColumns + column;
  const uint8_t* bytes = scales.at + first;
  const auto* words = reinterpret_cast<const uint16_t*>(scales.at) + first;
  if (scales.type == ScaleType::kFloat16) {
    AS_UNROLL for (int v = 0; v < V; ++v) out[v] = LoadHalf(words + v * kLanes);
  } else if (scales.type == ScaleType::kBFloat16) {
    AS_UNROLL for (int v = 0; v < V; ++v) out[v] = LoadBf16(words + v * kLanes);
  } else if (scales.type == ScaleType::kPower) {
    AS_UNROLL for (int v = 0; v < V; ++v) {
      out[v] = AsFloat(ShiftLeft<23>(LoadBytes(bytes + v * kLanes)));
    }
  } else {
    const uint16_t* block = scales.blocks + (group >> scales.block_shift) * kPanelColumns + column;
    AS_UNROLL for (int v = 0; v < V; ++v) {
      const VecI code = SubInt(LoadBytes(bytes + v * kLanes), Set1Int(128));
      out[v] = Mul(IntToFloat(code), LoadHalf(block + v * kLanes));
    }
  }
}

// Fetches what LoadScales<V> will load.
template <int V>
static AS_ALWAYS_INLINE void FetchScales(const PanelScales& scales, int64_t group, int64_t column) {
  const int64_t size = ScaleBytes(scales.type);
  const unsigned char* at = scales.at + (group * kPanelColumns + column) * size;
  for (int64_t i = 0; i < V * kLanes * size; i += 64) PrefetchStream(at + i);
  if (scales.type != ScaleType::kCode) return;
  const uint16_t* block = scales.blocks + (group >> scales.block_shift) * kPanelColumns + column;
  for (int64_t i = 0; i < V * kLanes; i += 32) PrefetchStream(block + i);
}

// One panel's weights, and what it has of WeightScales.
struct QuantPanel {
  const unsigned char* w;
  const unsigned char* high;  // null: none
  PanelScales scale, offset;
  const uint8_t* zero;  // [groups][64], or null: all are symmetric_zero
  int32_t symmetric_zero;
  int64_t columns;  // whole vectors
};

// `groups`: in a panel of `columns`, from column `begin` on.
static AS_ALWAYS_INLINE PanelScales ScalesOf(const WeightScales& scales, const void* stored,
                                             const uint16_t* blocks, int64_t p, int64_t groups,
                                             int64_t columns, int64_t begin) {
  PanelScales panel = {static_cast<const unsigned char*>(stored), blocks, scales.type, 0};
  if (stored != nullptr) panel.at += (p * groups * columns + begin) * ScaleBytes(scales.type);
  if (blocks == nullptr) return panel;
  while (scales.group_size << panel.block_shift < kScaleBlock) ++panel.block_shift;
  panel.blocks += p * (groups >> panel.block_shift) * kPanelColumns + begin;
  return panel;
}

template <Form kForm>
static AS_ALWAYS_INLINE QuantPanel PanelOf(const GemmArgs& args, int64_t p) {
  const WeightScales& scales = args.scales;
  const int64_t groups = args.k / scales.group_size;
  constexpr int64_t kWidth = ColumnsOf(kForm);
  const int64_t begin = args.strip_begin, lanes = begin * kLaneBytes;
  const int64_t columns = PanelWidth(args, FirstColumn(args, p));
  return {static_cast<const unsigned char*>(args.w) + p * args.k * LowBytes(kForm) + lanes,
          scales.high == nullptr ? nullptr : scales.high + p * args.k * kHighBytes + lanes,
          ScalesOf(scales, scales.scale, scales.block_scale, p, groups, kWidth, begin),
          ScalesOf(scales, scales.offset, scales.block_offset, p, groups, kWidth, begin),
          scales.zero == nullptr ? nullptr : scales.zero + p * groups * kPanelColumns + begin,
          scales.offset == nullptr ? ZeroOf(kForm) : 0,
          WholeVecs(columns)};
}

// A block of the integer path: `groups` whole groups, or a part of one.
struct ByteBlock {
  const int8_t* a;  // or widened rows, kWidenedStride apart
  int64_t lda;
  const unsigned char* b;  // [groups * lanes][64] lanes of four bytes, or half as many of nibbles
  const unsigned char* high;  // as the panel's
  const uint8_t* table;       // of form kTable: ByteTable
  int64_t groups, lanes;      // lanes of four k per group, within this block
  bool first, last;           // the group begins, and ends, in this block
  bool fresh;                 // c holds no sums before this block's first group
  bool in_registers;          // GroupTile's sums
  bool is_strip;              // b has a part of each panel's line
  const int32_t* a_sums;      // of the first row, the block's first group; see GroupSum
  int64_t ld_sums, sums_per_group;
  int64_t index;  // of the first group, from the row's begin
  // Of the panel's first group; the block's columns are those from `column` on. A scale belongs to
  // 2^w_shift groups.
  PanelScales scale;    // none: a scale for each column, which comes last
  PanelScales offset;   // none, or only fetched
  const uint8_t* zero;  // null: all are symmetric_zero
  int64_t column;
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

// The number of a group's weight scales and zero points.
static AS_ALWAYS_INLINE int64_t ScaleGroup(const ByteBlock& block, int64_t group) {
  return (block.index + group) >> block.w_shift;
}
static AS_ALWAYS_INLINE const uint8_t* ZerosAt(const ByteBlock& block, int64_t group) {
  return block.zero + ScaleGroup(block, group) * kPanelColumns + block.column;
}

// AddOffsets needs a group's offsets when the products are done: if it waited for them, a row of
// four bits would take a sixth longer (Zen 4).
template <int V>
static AS_ALWAYS_INLINE void FetchOffsets(const ByteBlock& block, int64_t group) {
  if (block.offset.at == nullptr) return;
  FetchScales<V>(block.offset, ScaleGroup(block, group), block.column);
}

// The sum of a group's activations. Unsigned: a row with a NaN may overflow.
static AS_ALWAYS_INLINE int32_t GroupSum(const ByteBlock& block, int64_t group, int64_t r) {
  const int32_t* sums = block.a_sums + r * block.ld_sums + group * block.sums_per_group;
  return static_cast<int32_t>(static_cast<uint32_t>(sums[block.sums_per_group]) -
                              static_cast<uint32_t>(sums[0]));
}

template <Form kForm, int R, int V>
static AS_ALWAYS_INLINE void StartGroup(const ByteBlock& block, int64_t group, VecI (&acc)[R][V]) {
  constexpr int32_t kBias = Biased(kForm) ? kByteBias : 0;
  if (block.zero == nullptr && block.symmetric_zero == kBias) {  // with offsets
    AS_UNROLL for (int r = 0; r < R; ++r) {
      AS_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = Set1Int(0);
    }
    return;
  }
  AS_UNROLL for (int r = 0; r < R; ++r) {
    const auto sum = -static_cast<uint32_t>(GroupSum(block, group, r));
    const auto start = sum * static_cast<uint32_t>(block.symmetric_zero - kBias);
    AS_UNROLL for (int v = 0; v < V; ++v) {
      acc[r][v] =
          block.zero == nullptr
              ? Set1Int(static_cast<int32_t>(start))
              : MulInt(SubInt(LoadBytes(ZerosAt(block, group) + v * kLanes), Set1Int(kBias)),
                       Set1Int(static_cast<int32_t>(sum)));
    }
  }
}

// Adds a group's scaled sums to those before it, which are where get(r, v) reads and put(r, v, x)
// writes them.
template <int R, int V, class Get, class Put>
static AS_ALWAYS_INLINE void AddGroup(const ByteBlock& block, int64_t group,
                                      const VecI (&acc)[R][V], const Get& get, const Put& put) {
  const bool scales_columns = block.scale.at != nullptr, scales_rows = block.a_scale != nullptr;
  const float* a_scale = block.a_scale + (scales_rows ? (block.index + group) >> block.a_shift : 0);
  const int64_t ld_scales = block.ld_scales;
  VecF scale[V];
  AS_UNROLL for (int v = 0; v < V; ++v) scale[v] = Zero();
  if (scales_columns) LoadScales<V>(block.scale, ScaleGroup(block, group), block.column, scale);
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
static AS_ALWAYS_INLINE void AddGroupInMemory(const ByteBlock& block, int64_t group,
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

// Adds the products of four k, the kUnit-th of a step.
template <Form kForm, int kUnit, int R, int V>
static AS_ALWAYS_INLINE void DotUnit(const int8_t* a, int64_t lda, const unsigned char* b,
                                     const unsigned char* high, VecI table, VecI (&acc)[R][V]) {
#if defined(AS_BYTES_IN_PAIRS16)
  static_cast<void>(high);
  DotUnitInPairs<kForm, kUnit, R, V>(a, lda, b, table, acc);
#else
  VecI u[V];
  AS_UNROLL for (int v = 0; v < V; ++v) {
    u[v] = Unit<kForm, kUnit>(b + v * kVecBytes,
                              kForm == Form::kSixBits ? high + v * kVecBytes : nullptr, table);
  }
  AS_UNROLL for (int r = 0; r < R; ++r) {
    const ByteRow x = BroadcastBytes(a + r * lda + 4 * kUnit);
    AS_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = DotBytes(acc[r][v], u[v], x);
  }
#endif
}

// DotGroup in units of four k.
template <Form kForm, int R, int V>
static AS_ALWAYS_INLINE void DotUnits(const ByteBlock& block, const int8_t*& a,
                                      const unsigned char*& b, const unsigned char*& high,
                                      Fetch& fetch, VecI (&acc)[R][V]) {
  const VecI table = kForm == Form::kTable ? LoadTable(block.table) : Set1Int(0);
  const int64_t lda = WidensRows(kForm, R) ? kWidenedStride : block.lda;
  for (int64_t k = 0; k < block.lanes * 4; k += StepK(kForm)) {
    FetchStep<V * StepBytes(kForm) / kPanelStride>(fetch);
    DotUnit<kForm, 0, R, V>(a, lda, b, high, table, acc);
    if constexpr (StepK(kForm) > 4) DotUnit<kForm, 1, R, V>(a, lda, b, high, table, acc);
    if constexpr (StepK(kForm) > 8) {
      DotUnit<kForm, 2, R, V>(a, lda, b, high, table, acc);
      DotUnit<kForm, 3, R, V>(a, lda, b, high, table, acc);
      AS_UNROLL for (int v = 0; v < V; ++v) {
        PrefetchStream(high + v * kVecBytes + kStreamPrefetch / 2);
      }
      high += kPanelStride;
    }
    a += StepK(kForm) * RowBytes(kForm, R);
    b += StepBytes(kForm);
  }
}

// Adds a group's products, from `a`, `b` and `high` on, which then point behind them.
template <Form kForm, int R, int V>
static AS_ALWAYS_INLINE void DotGroup(const ByteBlock& block, const int8_t*& a,
                                      const unsigned char*& b, const unsigned char*& high,
                                      Fetch& fetch, VecI (&acc)[R][V]) {
#if defined(AS_BYTES_IN_PAIRS16)
  if constexpr (UnitBits(kForm) == 4) {
    DotNibbleGroup<kForm, R, V>(block.lanes * 4, a, block.lda, b, fetch, acc);
  } else if constexpr (UnitBits(kForm) == 6) {
    DotSixBitGroup<kForm, R, V>(block.lanes * 4, a, block.lda, b, high, fetch, acc);
  } else
#endif
  {
    DotUnits<kForm, R, V>(block, a, b, high, fetch, acc);
  }
}

// R rows by V vectors of columns, over whole groups. The scaled sums stay in registers.
template <Form kForm, int R, int V>
void GroupTile(const ByteBlock& block) {
  const int8_t* a = block.a;
  const unsigned char *b = block.b, *high = block.high;
  Fetch fetch = block.fetch;
  VecF sum[R][V];
  AS_UNROLL for (int r = 0; r < R; ++r) {
    AS_UNROLL for (int v = 0; v < V; ++v) {
      sum[r][v] = block.fresh ? Zero() : LoadF(block.c + r * kPanelColumns + v * kLanes);
    }
  }
  for (int64_t group = 0; group < block.groups; ++group) {
    VecI acc[R][V];
    FetchOffsets<V>(block, group);
    StartGroup<kForm, R, V>(block, group, acc);
    DotGroup<kForm, R, V>(block, a, b, high, fetch, acc);
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
template <Form kForm, int R, int V>
void ByteTile(const ByteBlock& block) {
  const int8_t* a = block.a;
  const unsigned char *b = block.b, *high = block.high;
  Fetch fetch = block.fetch;
  for (int64_t group = 0; group < block.groups; ++group) {
    VecI acc[R][V];
    FetchOffsets<V>(block, group);
    if (block.first) {
      StartGroup<kForm, R, V>(block, group, acc);
    } else {
      AS_UNROLL for (int r = 0; r < R; ++r) {
        AS_UNROLL for (int v = 0; v < V; ++v) {
          acc[r][v] = LoadI(block.partial + r * kPanelColumns + v * kLanes);
        }
      }
    }
    DotGroup<kForm, R, V>(block, a, b, high, fetch, acc);
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

// On Intel's processors the two units that multiply vectors of 512 bits do everything else with
// them, too; AMD's have others. Set by FillForms.
#if !defined(__x86_64__)
#define AS_KERNELS_FEW_UNITS false
#elif !defined(AS_KERNELS_FEW_UNITS)
#define AS_KERNELS_FEW_UNITS __builtin_cpu_is("intel")
#endif
static bool has_few_units = false;

// Group tiles have half the columns of others, so that registers hold both sums: up to a twelfth
// faster on a Zen 4, the more the smaller the groups. Few rows stream their weights, and would read
// each panel twice. With few units, tiles of all columns with their sums in memory are a tenth
// faster (Emerald Rapids): they load less for a product, and stores take nothing from multipliers.
constexpr bool kHasGroupTiles = kLanes == 16;
constexpr int GroupVecs(int rows) { return rows <= 3 ? TileVecs(rows) : TileVecs(rows) / 2; }

// Vectors of columns of a tile of up to kTileRows rows.
static AS_ALWAYS_INLINE int ByteTileVecs(const ByteBlock& block, int64_t rows) {
  const int count = static_cast<int>(rows);
  return kHasGroupTiles && block.in_registers && rows <= kTileRows ? GroupVecs(count)
                                                                   : TileVecs(count);
}

// Steps of all of a block's k.
template <Form kForm>
static AS_ALWAYS_INLINE int64_t StepsOf(const ByteBlock& block) {
  return block.groups * block.lanes * 4 / StepK(kForm);
}

// Goes on to the next `count` columns.
static AS_ALWAYS_INLINE void PassColumns(ByteBlock& block, int64_t count) {
  block.b += count * kLaneBytes;
  if (block.high != nullptr) block.high += count * kLaneBytes;
  block.c += count;
  block.partial += count;
  block.column += count;
}

template <Form kForm, int R, int V, bool kGroups>
static AS_ALWAYS_INLINE void ByteTileColumns(ByteBlock& block, int64_t& columns) {
  while (columns >= V * kLanes) {
    if constexpr (kGroups) {
      GroupTile<kForm, R, V>(block);
    } else {
      ByteTile<kForm, R, V>(block);
    }
    block.fetch.at += StepsOf<kForm>(block) * block.fetch.step;
    PassColumns(block, V * kLanes);
    columns -= V * kLanes;
  }
  if constexpr (V > 1) ByteTileColumns<kForm, R, V / 2, kGroups>(block, columns);
}

template <Form kForm, int R>
static AS_ALWAYS_INLINE void ByteTilesOf(ByteBlock& block, int64_t& columns) {
  if constexpr (kHasGroupTiles) {
    if (block.in_registers) {
      return ByteTileColumns<kForm, R, GroupVecs(R), true>(block, columns);
    }
  }
  ByteTileColumns<kForm, R, TileVecs(R), false>(block, columns);
}

constexpr int64_t kFewUnitsUnpackRows = 40;

// The most rows whose tiles unpack a form as they go. For more rows, a block is spread to bytes
// before. With a dot product of bytes for whole vectors of 512 bits, multipliers are the limit, and
// unpacking takes other units, if there are any.
constexpr int64_t UnpackRows(Form form) {
  const bool takes_more = form == Form::kSixBits || form == Form::kTable;
#if defined(AS_KERNELS_NATIVE_VNNI)
  if (kLanes == 16) return form == Form::kSixBits ? kFewUnitsUnpackRows : kGemmRows;
#endif
  return takes_more ? 1 : kTileRows;
}

template <Form kForm>
void ByteTileRows(int64_t rows, ByteBlock block, int64_t columns) {
  constexpr int64_t kMost = Lower(UnpackRows(kForm), kTileRows);
  WithRows<kMost>(
      rows, [&block, &columns ]<int R>()
                __attribute__((always_inline)) { ByteTilesOf<kForm, R>(block, columns); });
}

// The rows of a tile as WidenRow leaves them.
template <Form kForm>
struct WidenedRows {
#if defined(AS_BYTES_IN_PAIRS16)
  alignas(64) int8_t rows[WidensRows(kForm, kTileRows) ? kTileRows * kWidenedStride : 1];

  // Of `count` rows at `a`.
  __attribute__((always_inline)) void Set(const int8_t* a, int64_t lda, int64_t count,
                                          ByteBlock* block) {
    const int64_t k = block->groups * block->lanes * 4;
    for (int64_t r = 0; r < count; ++r) WidenRow(a + r * lda, k, rows + r * kWidenedStride);
    block->a = rows;
  }
#endif
};

// Computes a block's rows in tiles: Tiles::NextRows gives a tile's rows, Tiles::Rows computes it.
template <Form kForm, class Tiles>
static AS_ALWAYS_INLINE void ByteTilesOver(ByteBlock block, int64_t rows, int64_t columns,
                                           const unsigned char* next, int64_t bytes,
                                           const Destination& destination) {
  const int64_t steps = StepsOf<kForm>(block);
  const int8_t* a = block.a;
  const int64_t lda = block.lda;
  [[maybe_unused]] WidenedRows<kForm> widened;
  for (int64_t r = 0; r < rows;) {
    const int64_t tile_rows = Tiles::NextRows(rows - r, block.lanes);
    if (rows == 1) {
      block.fetch = {block.b + StreamAhead(columns, ColumnsOf(kForm)), StepBytes(kForm)};
    } else if (block.is_strip) {
      block.fetch = {next, r == 0 ? bytes / steps : 0};
    } else {
      block.fetch = FetchShare(next, bytes, rows, r, tile_rows, steps, columns,
                               ByteTileVecs(block, tile_rows));
    }
    destination.FetchRows(r, tile_rows);
    block.a = a;
    if constexpr (WidensRows(kForm, kTileRows)) {
      if (tile_rows > 1) widened.Set(a, lda, tile_rows, &block);
    }
    Tiles::template Rows<kForm>(tile_rows, block, columns);
    block.offset.at = nullptr;
    a += tile_rows * lda;
    block.a_sums += tile_rows * block.ld_sums;
    if (block.a_scale != nullptr) block.a_scale += tile_rows * block.ld_scales;
    block.c += tile_rows * kPanelColumns;
    block.partial += tile_rows * kPanelColumns;
    r += tile_rows;
  }
}

// Tiles that use DotBytes (bytes.inl).
struct ByteTiles {
  static constexpr int64_t kRows = kGemmRows;  // of a block
  static constexpr bool kHasBlocks = false;    // whether Block computes some blocks as a whole

  // Whether a form is spread to bytes before this many rows pass over a block.
  static AS_ALWAYS_INLINE bool Spreads(Form form, int64_t rows) {
    return rows > UnpackRows(form) || (has_few_units && rows > kFewUnitsUnpackRows);
  }

  static AS_ALWAYS_INLINE int64_t NextRows(int64_t left, int64_t) {
    return TileShape<ByteTiles>::NextRows(left);
  }

  template <Form kForm>
  static AS_ALWAYS_INLINE void Rows(int64_t rows, const ByteBlock& block, int64_t columns) {
    ByteTileRows<kForm>(rows, block, columns);
  }
};

// The k of one exact sum.
static AS_ALWAYS_INLINE int64_t SumGroup(const GemmArgs& args) {
  const int64_t size = args.scales.group_size;
  return args.a_scale_group > 0 && args.a_scale_group < size ? args.a_scale_group : size;
}

// How many groups of sums, as a power of two, share a scale that belongs to `scale_group` of k.
static AS_ALWAYS_INLINE int SharedBy(int64_t scale_group, int64_t group) {
  int shift = 0;
  while (group << shift < scale_group) ++shift;
  return shift;
}

// Groups of K whose offsets are widened at a time: 16 KiB.
constexpr int64_t kOffsetGroups = 64;

// AddOffsets of one row, V vectors from `column` on.
template <int V, class SumOf>
void AddOffsetsOfRow(const PanelScales& offsets, int shift, int64_t groups, int64_t column,
                     float* c, const SumOf& sum_of) {
  VecF sum[V];
  AS_UNROLL for (int v = 0; v < V; ++v) sum[v] = LoadF(c + column + v * kLanes);
  for (int64_t g = 0; g < groups; ++g) {
    const VecF a = Set1(sum_of(0, g));
    VecF offset[V];
    LoadScales<V>(offsets, g >> shift, column, offset);
    AS_UNROLL for (int v = 0; v < V; ++v) sum[v] = Fma(a, offset[v], sum[v]);
  }
  AS_UNROLL for (int v = 0; v < V; ++v) StoreF(c + column + v * kLanes, sum[v]);
}

// Adds the products of the groups' sums of activations, sum_of(row, group), and their offsets, to
// c: a chain over `groups` groups ascending. An offset belongs to 2^shift of them.
template <class SumOf>
void AddOffsets(const QuantPanel& panel, int shift, int64_t groups, int64_t rows, float* c,
                const SumOf& sum_of) {
  if (rows == 1) {
    constexpr int kVecs = kPanelColumns / kLanes;
    if (panel.columns == kPanelColumns) {
      return AddOffsetsOfRow<kVecs>(panel.offset, shift, groups, 0, c, sum_of);
    }
    for (int64_t column = 0; column < panel.columns; column += kLanes) {
      AddOffsetsOfRow<1>(panel.offset, shift, groups, column, c, sum_of);
    }
    return;
  }
  alignas(64) float offsets[kOffsetGroups * kPanelColumns], sums[kTileRows * kOffsetGroups];
  for (int64_t begin = 0; begin < groups; begin += kOffsetGroups) {
    const int64_t count = Lower(groups - begin, kOffsetGroups);
    for (int64_t g = 0; g < count; ++g) {
      for (int64_t i = 0; i < panel.columns; i += kLanes) {
        VecF offset[1];
        LoadScales<1>(panel.offset, (begin + g) >> shift, i, offset);
        StoreF(offsets + g * kPanelColumns + i, offset[0]);
      }
    }
    TileArgs<float> tile;
    tile.a = sums;
    tile.lda = count;
    tile.b = reinterpret_cast<const unsigned char*>(offsets);
    tile.b_stride = kPanelStride;
    tile.groups = count;
    tile.ldc = kPanelColumns;
    tile.resume = true;
    tile.fetch = {tile.b, 0};
    for (int64_t r = 0; r < rows;) {
      const int64_t tile_rows = TileShape<DotFloat>::NextRows(rows - r);
      for (int64_t i = 0; i < tile_rows; ++i) {
        for (int64_t g = 0; g < count; ++g) sums[i * count + g] = sum_of(r + i, begin + g);
      }
      tile.c = c + r * kPanelColumns;
      TileRows<DotFloat>(tile_rows, tile, panel.columns);
      r += tile_rows;
    }
  }
}

template <Form kForm, class Tiles>
void GemmBytesRows(const GemmArgs& args, const QuantPanel& panel, int64_t row_begin, int64_t rows,
                   int32_t* partial, unsigned char* spread, float* c,
                   const Destination& destination) {
  const int64_t group = SumGroup(args);
  const bool has_column_scales = args.scales.group_size == args.k;
  const bool has_row_scales = args.a_scale_group == 0;
  const bool scales_last = has_column_scales && !has_row_scales && panel.offset.at == nullptr;
  const int64_t features = ByteBlockFor<kForm>(rows);
  const int64_t whole_groups = features / group;  // 0: a group takes several blocks
  ByteBlock block;
  block.lda = args.lda;
  block.ld_sums = RowSums(args.k);
  block.sums_per_group = group == args.k ? block.ld_sums - 1 : group / kSumBlock;
  block.partial = partial;
  block.c = c;
  alignas(16) uint8_t table[16];
  if (kForm == Form::kTable) ByteTable(args.scales.table, table);
  block.table = table;
  block.scale = panel.scale;
  if (scales_last) block.scale.at = nullptr;
  block.column = 0;
  block.in_registers = !has_few_units && rows > kGemmFewRows && whole_groups > 0;
  block.is_strip = IsStrip(args);
  block.zero = panel.zero;
  block.offset = panel.offset;
  block.symmetric_zero = panel.symmetric_zero;
  // A column's only zero point belongs to all groups, however many.
  block.w_shift = has_column_scales ? 62 : SharedBy(args.scales.group_size, group);
  block.ld_scales = RowScales(args.k, args.a_scale_group);
  block.a_scale = has_row_scales ? nullptr : args.a_scale + row_begin * block.ld_scales;
  block.a_shift = has_row_scales ? 0 : SharedBy(args.a_scale_group, group);
  const int32_t* sums = args.a_sums + row_begin * block.ld_sums;
  for (int64_t k = 0, next; k < args.k; k = next) {
    const int64_t index = k / group;
    const int64_t end =
        whole_groups > 0 ? k + whole_groups * group : Lower(k + features, (index + 1) * group);
    next = Lower(end, args.k);
    block.groups = whole_groups > 0 ? (next - k) / group : 1;
    block.lanes = (next - k) / block.groups / 4;
    block.first = k % group == 0;
    block.last = next % group == 0;
    block.fresh = index == 0;
    block.index = index;
    block.a = static_cast<const int8_t*>(args.a) + row_begin * args.lda + k;
    block.b = panel.w + k * LowBytes(kForm);
    block.high = panel.high == nullptr ? nullptr : panel.high + k * kHighBytes;
    block.a_sums = group == args.k ? sums : sums + k / kSumBlock;
    const int64_t bytes = (next - k) * LowBytes(kForm);
    const Destination fetched = k == 0 ? destination : Destination{};
    const unsigned char* next_block = block.b + bytes;
    if constexpr (Tiles::kHasBlocks) {
      if (Tiles::template Block<kForm>(block, rows, spread, next_block, bytes, fetched)) continue;
    }
    if constexpr (!IsBytes(kForm)) {
      if (Tiles::Spreads(kForm, rows)) {
        Spread<kForm>(block.b, block.high, table, next - k, panel.columns, spread);
        block.b = spread;
        // The weights are bytes now, but their zero point is still that of their form.
        ByteTilesOver<SpreadForm(kForm), Tiles>(block, rows, panel.columns, next_block, bytes,
                                                fetched);
        continue;
      }
    }
    ByteTilesOver<kForm, Tiles>(block, rows, panel.columns, next_block, bytes, fetched);
  }
  if (panel.offset.at != nullptr) {
    const float* a_scale =
        block.a_scale == nullptr ? nullptr : args.a_scale + row_begin * block.ld_scales;
    block.a_sums = sums;
    AddOffsets(panel, block.w_shift, args.k / group, rows, c, [&](int64_t row, int64_t index) {
      const auto sum = static_cast<float>(GroupSum(block, index, row));
      if (a_scale == nullptr) return sum;
      return sum * a_scale[row * block.ld_scales + (index >> block.a_shift)];
    });
  }
  if (block.scale.at != nullptr) return;
  for (int64_t i = 0; i < panel.columns; i += kLanes) {
    VecF scale[1];
    LoadScales<1>(panel.scale, 0, i, scale);
    for (int64_t r = 0; r < rows; ++r) {
      float* sum = c + r * kPanelColumns + i;
      StoreF(sum, Mul(LoadF(sum), scale[0]));
    }
  }
}

template <Form kForm, class Tiles>
struct GemmBytes {
  template <class Store>
  static AS_ALWAYS_INLINE void Run(const GemmArgs& args, const Store& store) {
    if constexpr (kForm == Form::kBytes && Store::kTakesNarrow) {
      if (args.panel_columns == kNarrowPanelColumns) {
        return GemmBytes<Form::kNarrowBytes, ByteTiles>::Run(args, store);
      }
    }
    constexpr bool kSpreads = !IsBytes(kForm) || Tiles::kHasBlocks;
    alignas(64) int32_t partial[Tiles::kRows * kPanelColumns];
    alignas(64) unsigned char spread[kSpreads ? kByteBlock * kPanelColumns : 1];
    ForEachRowBlock<Tiles::kRows>(
        args, store,
        [&](int64_t p, int64_t row, int64_t rows, float* sums, const Destination& destination) {
          GemmBytesRows<kForm, Tiles>(args, PanelOf<kForm>(args, p), row, rows, partial, spread,
                                      sums, destination);
        });
  }
};

// AddLowRankFunction of int8.
template <class Tiles>
void AddLowRankBytes(const LowRank& low, int64_t row, int64_t rows, int64_t panel,
                     float* sums) noexcept {
  const int64_t groups = low.k / kSumBlock, first = (panel - low.panel_begin) * groups;
  ByteBlock block{};
  block.lda = low.lda;
  block.lanes = kSumBlock / 4;
  block.first = block.last = true;
  block.ld_sums = low.ld_sums;
  block.sums_per_group = 1;
  block.scale = {reinterpret_cast<const unsigned char*>(low.b_scale + first * kPanelColumns),
                 nullptr, ScaleType::kBFloat16, 0};
  block.symmetric_zero = ZeroOf(Form::kBytes);
  block.a_scale = low.a_scale + row * low.ld_scales;
  block.ld_scales = low.ld_scales;
  block.partial = reinterpret_cast<int32_t*>(sums);  // No group takes several blocks.
  block.c = sums;
  for (int64_t k = 0, next; k < low.k; k = next) {
    next = Lower(k + kByteBlock, low.k);
    const int64_t bytes = (next - k) * LowBytes(Form::kBytes);
    block.index = k / kSumBlock;
    block.groups = (next - k) / kSumBlock;
    block.a = static_cast<const int8_t*>(low.a) + row * low.lda + k;
    block.a_sums = low.a_sums + row * low.ld_sums + block.index;
    block.b = static_cast<const unsigned char*>(low.b) +
              ((panel - low.panel_begin) * low.k + k) * LowBytes(Form::kBytes);
    ByteTilesOver<Form::kBytes, Tiles>(block, rows, kPanelColumns, block.b + bytes, bytes, {});
  }
}

// The kernels of slot uint4: which form a weight has, its WeightScales say.
template <template <Form> class Kernel>
struct OfNibbles {
  template <class Store>
  static AS_ALWAYS_INLINE void Run(const GemmArgs& args, const Store& store) {
    if (args.scales.high != nullptr) return Kernel<Form::kSixBits>::Run(args, store);
    if (args.scales.table != nullptr) return Kernel<Form::kTable>::Run(args, store);
    Kernel<Form::kNibbles>::Run(args, store);
  }
};

// Families of these kernels, one for each form.
template <class Tiles>
struct InBytes {
  static constexpr bool kFloats = false;
  template <Form kForm>
  using Of = GemmBytes<kForm, Tiles>;
};

// Puts a family into the slots of quantised weights.
template <class Family>
static AS_ALWAYS_INLINE void FillForms(KernelTable& table, DType activation) {
  if constexpr (kLanes == 16) has_few_units = AS_KERNELS_FEW_UNITS;
  FillGemm<typename Family::template Of<Form::kBytes>>(table, DType::kUInt8, activation);
  FillGemm<OfNibbles<Family::template Of>>(table, DType::kUInt4, activation);
  if constexpr (Family::kFloats) {
    FillGemm<typename Family::template Of<Form::kFloat8>>(table, DType::kFloat8E4M3, activation);
  } else {
    table.low_rank[static_cast<int>(activation)] = AddLowRankBytes<ByteTiles>;
  }
}

// Rows of a packed quantised table.
template <Form kForm>
void EmbeddingRows(const EmbeddingArgs& args) {
  const WeightScales& scales = args.scales;
  const int64_t groups = args.cols / scales.group_size;
  for (int64_t r = 0; r < args.rows; ++r) {
    const int64_t panel = args.ids[r] / kPanelColumns, column = args.ids[r] % kPanelColumns;
    const int64_t panel_k = panel * args.cols, lane = column * kLaneBytes;
    const unsigned char* w =
        static_cast<const unsigned char*>(args.table) + panel_k * LowBytes(kForm) + lane;
    const unsigned char* high =
        scales.high == nullptr ? nullptr : scales.high + panel_k * kHighBytes + lane;
    for (int64_t i = 0; i < args.cols; ++i) {
      const int64_t group = (panel * groups + i / scales.group_size) * kPanelColumns + column;
      const int32_t u = StoredAt<kForm>(w, high, i);
      float number;
      if (kForm == Form::kFloat8) {
        number = ToFloat(Float8E4M3{static_cast<uint8_t>(u)});
      } else if (kForm == Form::kTable) {
        number = scales.table[u];
      } else {
        const int32_t zero = scales.offset != nullptr ? 0
                             : scales.zero == nullptr ? ZeroOf(kForm)
                                                      : scales.zero[group];
        number = static_cast<float>(u - zero);
      }
      number *= ScaleAt(scales, group);
      if (scales.offset != nullptr) number += OffsetAt(scales, group);
      args.out[r * args.ldo + i] = number;
    }
  }
}

template <Form kForm>
void EmbeddingQuantized(const EmbeddingArgs& args) noexcept {
  if (kForm == Form::kNibbles && args.scales.high != nullptr) {
    return EmbeddingRows<Form::kSixBits>(args);
  }
  if (kForm == Form::kNibbles && args.scales.table != nullptr) {
    return EmbeddingRows<Form::kTable>(args);
  }
  EmbeddingRows<kForm>(args);
}

}  // namespace
}  // namespace allspark::kernels
