// The register tile on AMX. One instruction multiplies 16 rows of A by 16 columns of B, 16 k groups
// deep. A panel's lanes are stored in the order that a tile of B needs, so the callers of tile.inl
// and quantized.inl have nothing to pack.
//
// The instruction sums the products of even and of odd elements separately, from zero, and adds
// both sums to C. K is divided at multiples of 16 groups, counted from its start, wherever a block
// of K ends. A row's bits depend neither on other rows nor on their number.
#pragma once

#include "kernels/cpu/quantized.inl"
#include "kernels/cpu/tile.inl"

namespace allspark::kernels {
namespace {

constexpr int64_t kAmxRows = 16;    // of a tile of A or C
constexpr int64_t kAmxGroups = 16;  // of a tile of A or B
constexpr int64_t kAmxColumns = 16;
constexpr int64_t kAmxLine = 64;  // bytes of a row of a tile
constexpr int64_t kAmxTileBytes = kAmxRows * kAmxLine;
// Rows that a pass over a panel takes at a time, in two tiles.
constexpr int64_t kAmxPairRows = 2 * kAmxRows;
// Rows that pass over a block of K, of 128 KiB, before the next: their part of A, half a MiB, and
// the block fit the second-level cache twice.
constexpr int64_t kAmxBlockRows = 256;

// Tiles 0 to 3 hold C, 4 and 5 hold A, 6 and 7 hold B. With more than 16 rows, tiles 2, 3 and 5
// hold the rows after the first 16. Otherwise all tiles of C belong to the rows in tile 4.
struct alignas(64) AmxConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  __attribute__((always_inline)) AmxConfig(int64_t num_rows, int64_t groups) {
    const bool two = num_rows > kAmxRows;
    const int64_t first = Lower(num_rows, kAmxRows), second = two ? num_rows - kAmxRows : first;
    Set(0, first, kAmxColumns);
    Set(1, first, kAmxColumns);
    Set(2, second, kAmxColumns);
    Set(3, second, kAmxColumns);
    Set(4, first, groups);
    Set(5, second, groups);
    Set(6, groups, kAmxColumns);
    Set(7, groups, kAmxColumns);
  }
  __attribute__((always_inline)) void Set(int tile, int64_t tile_rows, int64_t lanes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(lanes * kLaneBytes);
  }
};

// What the tiles read and write. Strides in bytes.
struct AmxOperands {
  const unsigned char* a;
  int64_t a_stride;
  const unsigned char* b;  // of one k group, whose lanes are contiguous
  int64_t b_stride;
  int64_t steps;  // each takes as many groups as are configured
  unsigned char* c;
  int64_t c_stride;
  bool resume;
  Fetch fetch;  // fetch.step bytes with every step
};

// kBytes: signed bytes times unsigned bytes, summed in int32; otherwise bfloat16. Macros, because
// the intrinsics need literal tile numbers.
#define AS_AMX_DOT(c, a, b)  \
  if constexpr (kBytes) {    \
    _tile_dpbsud(c, a, b);   \
  } else {                   \
    _tile_dpbf16ps(c, a, b); \
  }
#define AS_AMX_BEGIN(tile, at)           \
  {                                      \
    if (x.resume) {                      \
      _tile_loadd(tile, at, x.c_stride); \
    } else {                             \
      _tile_zero(tile);                  \
    }                                    \
  }

static AS_ALWAYS_INLINE void AmxFetch(Fetch& fetch) {
  for (int64_t i = 0; i < fetch.step; i += 64) PrefetchStream(fetch.at + i);
  fetch.at += fetch.step;
}

// Up to 16 rows by 64 columns: every byte of B is read once.
template <bool kBytes>
static AS_ALWAYS_INLINE void AmxOneByFour(AmxOperands x) {
  AS_AMX_BEGIN(0, x.c)
  AS_AMX_BEGIN(1, x.c + kAmxLine)
  AS_AMX_BEGIN(2, x.c + 2 * kAmxLine)
  AS_AMX_BEGIN(3, x.c + 3 * kAmxLine)
  for (int64_t step = 0; step < x.steps; ++step) {
    AmxFetch(x.fetch);
    _tile_loadd(4, x.a, x.a_stride);
    _tile_loadd(6, x.b, x.b_stride);
    _tile_loadd(7, x.b + kAmxLine, x.b_stride);
    AS_AMX_DOT(0, 4, 6)
    AS_AMX_DOT(1, 4, 7)
    _tile_loadd(6, x.b + 2 * kAmxLine, x.b_stride);
    _tile_loadd(7, x.b + 3 * kAmxLine, x.b_stride);
    AS_AMX_DOT(2, 4, 6)
    AS_AMX_DOT(3, 4, 7)
    x.a += kAmxLine;
    x.b += kAmxGroups * x.b_stride;
  }
  _tile_stored(0, x.c, x.c_stride);
  _tile_stored(1, x.c + kAmxLine, x.c_stride);
  _tile_stored(2, x.c + 2 * kAmxLine, x.c_stride);
  _tile_stored(3, x.c + 3 * kAmxLine, x.c_stride);
}

// 17 to 32 rows by 32 columns: each tile that is loaded serves two products.
template <bool kBytes>
static AS_ALWAYS_INLINE void AmxTwoByTwo(AmxOperands x) {
  unsigned char* const below = x.c + kAmxRows * x.c_stride;
  AS_AMX_BEGIN(0, x.c)
  AS_AMX_BEGIN(1, x.c + kAmxLine)
  AS_AMX_BEGIN(2, below)
  AS_AMX_BEGIN(3, below + kAmxLine)
  for (int64_t step = 0; step < x.steps; ++step) {
    AmxFetch(x.fetch);
    _tile_loadd(4, x.a, x.a_stride);
    _tile_loadd(6, x.b, x.b_stride);
    AS_AMX_DOT(0, 4, 6)
    _tile_loadd(7, x.b + kAmxLine, x.b_stride);
    AS_AMX_DOT(1, 4, 7)
    _tile_loadd(5, x.a + kAmxRows * x.a_stride, x.a_stride);
    AS_AMX_DOT(2, 5, 6)
    AS_AMX_DOT(3, 5, 7)
    x.a += kAmxLine;
    x.b += kAmxGroups * x.b_stride;
  }
  _tile_stored(0, x.c, x.c_stride);
  _tile_stored(1, x.c + kAmxLine, x.c_stride);
  _tile_stored(2, below, x.c_stride);
  _tile_stored(3, below + kAmxLine, x.c_stride);
}

// Up to 32 rows by 16 columns, of a narrow panel. `two`: more than 16 rows.
template <bool kBytes>
static AS_ALWAYS_INLINE void AmxTwoByOne(AmxOperands x, bool two) {
  unsigned char* const below = x.c + kAmxRows * x.c_stride;
  AS_AMX_BEGIN(0, x.c)
  if (two) AS_AMX_BEGIN(2, below)
  for (int64_t step = 0; step < x.steps; ++step) {
    AmxFetch(x.fetch);
    _tile_loadd(4, x.a, x.a_stride);
    _tile_loadd(6, x.b, x.b_stride);
    AS_AMX_DOT(0, 4, 6)
    if (two) {
      _tile_loadd(5, x.a + kAmxRows * x.a_stride, x.a_stride);
      AS_AMX_DOT(2, 5, 6)
    }
    x.a += kAmxLine;
    x.b += kAmxGroups * x.b_stride;
  }
  _tile_stored(0, x.c, x.c_stride);
  if (two) _tile_stored(2, below, x.c_stride);
}

#undef AS_AMX_DOT
#undef AS_AMX_BEGIN

// This thread's current tile configuration. It is kept while an AmxSession lasts, because
// configuring takes as long as about thirty products.
struct AmxState {
  int64_t rows = 0, groups = 0;
  int sessions = 0;
};
thread_local AmxState amx_state;

// Releases the tiles when the outermost session ends. Other code in the process may use the tiles
// between two sessions. If they stayed configured, the system would save them at every context
// switch of the thread.
class AmxSession {
 public:
  __attribute__((always_inline)) AmxSession() { ++amx_state.sessions; }
  __attribute__((always_inline)) ~AmxSession() {
    if (--amx_state.sessions > 0) return;
    _tile_release();
    amx_state = {};
  }
  AmxSession(const AmxSession&) = delete;
  AmxSession& operator=(const AmxSession&) = delete;
};

static AS_ALWAYS_INLINE void AmxConfigure(int64_t rows, int64_t groups) {
  // GCC does not know that the tile instructions read memory. A compiler barrier makes it write
  // their operands first.
  if (amx_state.rows == rows && amx_state.groups == groups) {
    __asm__ volatile("" ::: "memory");
    return;
  }
  const AmxConfig config(rows, groups);
  __asm__ volatile("" ::: "memory");
  _tile_loadconfig(&config);
  amx_state.rows = rows;
  amx_state.groups = groups;
}

// All columns of up to 32 rows, for which the tiles are configured: 64, or fewer of which the last
// tile is padded.
template <bool kBytes>
static AS_ALWAYS_INLINE void AmxColumns(int64_t rows, const AmxOperands& operands,
                                        int64_t columns) {
  if (columns < kPanelColumns) {
    AmxOperands part = operands;
    if (part.b_stride == kPanelStride) part.fetch.step = 0;  // The next lines are not contiguous.
    for (; columns > 0; columns -= kAmxColumns) {
      AmxTwoByOne<kBytes>(part, rows > kAmxRows);
      part.b += kAmxLine;
      part.c += kAmxLine;
      part.fetch.step = 0;
    }
  } else if (rows <= kAmxRows) {
    AmxOneByFour<kBytes>(operands);
  } else {
    AmxOperands half = operands;
    half.fetch.step = (operands.fetch.step + 1) / 2;
    AmxTwoByTwo<kBytes>(half);
    half.fetch.at += operands.steps * half.fetch.step;
    half.b += 2 * kAmxLine;
    half.c += 2 * kAmxLine;
    AmxTwoByTwo<kBytes>(half);
  }
}

// `groups` k groups of up to 32 rows: steps of 16 groups, then one shorter step for the rest.
// Requires an AmxSession.
template <bool kBytes>
static AS_ALWAYS_INLINE void AmxTile(int64_t rows, AmxOperands operands, int64_t groups,
                                     int64_t columns) {
  operands.steps = groups / kAmxGroups;
  if (operands.steps > 0) {
    AmxConfigure(rows, kAmxGroups);
    AmxColumns<kBytes>(rows, operands, columns);
    operands.a += operands.steps * kAmxLine;
    operands.b += operands.steps * kAmxGroups * operands.b_stride;
    operands.fetch.at += operands.steps * operands.fetch.step;
    operands.resume = true;
  }
  if (groups % kAmxGroups > 0) {
    AmxConfigure(rows, groups % kAmxGroups);
    operands.steps = 1;
    AmxColumns<kBytes>(rows, operands, columns);
  }
  if (groups == 0 && !operands.resume) {
    for (int64_t r = 0; r < rows; ++r) {
      __builtin_memset(operands.c + r * operands.c_stride, 0, static_cast<size_t>(columns) * 4);
    }
  }
}

// A GEMM within an AmxSession.
template <class Kernel>
struct OnAmx {
  template <class Store>
  static AS_ALWAYS_INLINE void Run(const GemmArgs& args, const Store& store) {
    const AmxSession session;
    Kernel::Run(args, store);
  }
};

// The same for a family of quantized.inl.
template <class Family>
struct FamilyOnAmx {
  static constexpr bool kFloats = Family::kFloats;
  template <Form kForm>
  using Of = OnAmx<typename Family::template Of<kForm>>;
};

// bfloat16 A and B, for the callers of TileRows.
struct DotAmx {
  using A = uint16_t;
  static constexpr int64_t kGroup = 2;
};

template <>
struct TileShape<DotAmx> {
  static constexpr int64_t kStreamRows = kAmxRows;
  static AS_ALWAYS_INLINE int64_t NextRows(int64_t left) { return Lower(left, kAmxPairRows); }
};

template <>
void TileRows<DotAmx>(int64_t rows, const TileArgs<uint16_t>& args, int64_t columns) {
  AmxOperands operands;
  operands.a = reinterpret_cast<const unsigned char*>(args.a);
  operands.a_stride = args.lda * 2;
  operands.b = args.b;
  operands.b_stride = args.b_stride;
  operands.c = reinterpret_cast<unsigned char*>(args.c);
  operands.c_stride = args.ldc * 4;
  operands.resume = args.resume;
  operands.fetch = {args.fetch.at, args.fetch.step * kAmxGroups};
  AmxTile<false>(rows, operands, args.groups, columns);
}

void AddLowRankOnAmx(const LowRank& low, int64_t row, int64_t rows, int64_t panel,
                     float* sums) noexcept {
  const AmxSession session;
  AddLowRank<uint16_t, DotAmx>(low, row, rows, panel, sums);
}

// Signed bytes times unsigned bytes, for GemmBytes, with the same integers as ByteTiles. The tiles
// of ByteTiles are used where rows are too few to fill AMX tiles, and where groups are too small
// for one.
struct AmxByteTiles {
  static constexpr int64_t kAmxFewestLanes = kAmxGroups;

  static AS_ALWAYS_INLINE bool Spreads(Form, int64_t rows) { return rows > kTileRows; }

  static AS_ALWAYS_INLINE int64_t NextRows(int64_t left, int64_t lanes) {
    return lanes < kAmxFewestLanes ? ByteTiles::NextRows(left, lanes)
                                   : TileShape<DotAmx>::NextRows(left);
  }

  template <Form kForm>
  static void Rows(int64_t rows, const ByteBlock& block, int64_t columns) {
    if (kForm != Form::kBytes || rows <= kTileRows) {
      return ByteTileRows<kForm>(rows, block, columns);
    }
    AmxOperands operands;
    operands.a = reinterpret_cast<const unsigned char*>(block.a);
    operands.a_stride = block.lda;
    operands.b = block.b;
    operands.b_stride = kPanelStride;
    operands.c = reinterpret_cast<unsigned char*>(block.partial);
    operands.c_stride = kPanelStride;
    // A group that begins here starts from zero: its start values are added at its end.
    operands.resume = !block.first;
    operands.fetch = {block.fetch.at, block.fetch.step * kAmxGroups};
    for (int64_t group = 0; group < block.groups; ++group) {
      AmxTile<true>(rows, operands, block.lanes, columns);
      operands.a += block.lanes * kLaneBytes;
      operands.b += block.lanes * kPanelStride;
      operands.fetch.at += block.lanes * block.fetch.step;
      if (columns == kPanelColumns) {
        EndGroup<kPanelColumns / kLanes>(rows, block, group);
        continue;
      }
      ByteBlock part = block;
      for (int64_t left = columns; left > 0; left -= kLanes) {
        EndGroup<1>(rows, part, group);
        PassColumns(part, kLanes);
      }
    }
  }

  // What follows a group's products, of kVecs vectors of columns.
  template <int kVecs>
  static AS_ALWAYS_INLINE void EndGroup(int64_t rows, const ByteBlock& block, int64_t group) {
    if (block.last) {
      FinishRows<kVecs>(rows, block, group);
    } else if (block.first) {
      StartRows<kVecs>(rows, block, group);
    }
  }

  // Adds the start values of a group that goes on in the next block.
  template <int kVecs>
  static AS_ALWAYS_INLINE void StartRows(int64_t rows, ByteBlock block, int64_t group) {
    for (int64_t r = 0; r < rows; ++r) {
      VecI sums[1][kVecs];
      StartGroup<Form::kBytes, 1, kVecs>(block, group, sums);
      AS_UNROLL for (int v = 0; v < kVecs; ++v) {
        int32_t* partial = block.partial + v * kLanes;
        StoreI(partial, AddInt(LoadI(partial), sums[0][v]));
      }
      block.a_sums += block.ld_sums;
      block.partial += kPanelColumns;
    }
  }

  // Adds a group's scaled sums to c, and before them the start values of a group that is whole.
  template <int kVecs>
  static AS_ALWAYS_INLINE void FinishRows(int64_t rows, ByteBlock block, int64_t group) {
    for (int64_t r = 0; r < rows; ++r) {
      VecI sums[1][kVecs];
      if (block.first) {
        StartGroup<Form::kBytes, 1, kVecs>(block, group, sums);
      } else {
        AS_UNROLL for (int v = 0; v < kVecs; ++v) sums[0][v] = Set1Int(0);
      }
      AS_UNROLL for (int v = 0; v < kVecs; ++v) {
        sums[0][v] = AddInt(sums[0][v], LoadI(block.partial + v * kLanes));
      }
      AddGroupInMemory<1, kVecs>(block, group, sums);
      block.a_sums += block.ld_sums;
      if (block.a_scale != nullptr) block.a_scale += block.ld_scales;
      block.c += kPanelColumns;
      block.partial += kPanelColumns;
    }
  }
};

}  // namespace
}  // namespace allspark::kernels
