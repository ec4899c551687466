// GEMM over packed panels of 64 columns, or 16 for narrow panels. A block of the panel's K stays in
// the cache while a block of rows passes over it in register tiles. Between K blocks, partial sums
// are kept in a small float32 buffer, which changes no bits. One code path serves any number of
// rows.
#pragma once

#include "kernels/cpu/rowwise.inl"
#include "kernels/cpu/tile.inl"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {
namespace {

// Bytes of a k group of a panel of kPanelColumns.
constexpr int64_t kPanelStride = kPanelColumns * kLaneBytes;
// Rows of a block, whose partial sums are kept together.
constexpr int64_t kGemmRows = 96;
// Groups of K per block. With many rows, a block is 128 KiB of a panel, which stays in the
// second-level cache. With blocks of 32 KiB, the start and end of a tile took up to a tenth of its
// time. With few rows, every byte of the panel comes from memory and is used only a few times. A
// block is then 16 KiB, which stays in the first-level cache.
constexpr int64_t kGemmGroups = 512;
constexpr int64_t kGemmFewGroups = 64;
constexpr int64_t kGemmFewRows = 2 * kTileRows;
// How many bytes ahead a tile that streams the panel fetches.
constexpr int64_t kStreamPrefetch = 4096;

// Copies rows next to each other, as float32: rows a power of two apart would share few cache sets.
template <class Element>
static AS_ALWAYS_INLINE void GatherRows(const Element* a, int64_t lda, int64_t rows, int64_t k,
                                        float* out, int64_t ldo) {
  for (int64_t r = 0; r < rows; ++r) {
    const Element* from = a + r * lda;
    float* to = out + r * ldo;
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) StoreF(to + i, LoadFloats(from + i));
    for (; i < k; ++i) to[i] = FloatOf(from[i]);
  }
}

// Finishes a row's sums: times the row's scale if it has one, plus bias. Holds copies of fields of
// GemmArgs, so that the compiler knows that stores to the results do not alias them.
struct RowFinish {
  const float* a_scale;
  const float* bias;
  VecF scale;

  __attribute__((always_inline)) explicit RowFinish(const GemmArgs& args)
      : a_scale(args.a_scale_group == 0 ? args.a_scale : nullptr), bias(args.bias), scale(Zero()) {}

  __attribute__((always_inline)) void Begin(int64_t row) {
    if (a_scale != nullptr) scale = Set1(a_scale[row]);
  }
  __attribute__((always_inline)) VecF operator()(const float* sums, int64_t column,
                                                 Mask mask) const {
    VecF x = LoadF(sums);
    if (a_scale != nullptr) x = Mul(x, scale);
    if (bias != nullptr) x = Add(x, MaskLoadF(mask, bias + column));
    return x;
  }
};

// Where the results of a panel's rows are stored. Their cache lines are fetched while the rows are
// computed, since they are seldom in the cache. When all stores waited for their lines at the end,
// that took an eighth of the time of int8 rows.
struct Destination {
  const unsigned char* at = nullptr;
  int64_t stride = 0, bytes = 0;  // of a row

  __attribute__((always_inline)) void FetchRows(int64_t first, int64_t count) const {
    for (int64_t r = first; r < first + count; ++r) {
      for (int64_t i = 0; i < bytes; i += 64) Prefetch(at + r * stride + i);
    }
  }
};

// The first column that a call computes of a panel.
static AS_ALWAYS_INLINE int64_t FirstColumn(const GemmArgs& args, int64_t panel) {
  return panel * args.panel_columns + args.strip_begin;
}
// How many, from this first one on.
static AS_ALWAYS_INLINE int64_t PanelWidth(const GemmArgs& args, int64_t column) {
  return Lower(args.n - column, Lower(args.panel_columns, args.strip_columns));
}
static AS_ALWAYS_INLINE bool IsStrip(const GemmArgs& args) {
  return args.strip_columns < kPanelColumns;
}
// How far ahead a tile of one row fetches: as many bytes of a strip as of a panel.
static AS_ALWAYS_INLINE int64_t StreamAhead(int64_t columns, int64_t panel_columns) {
  return kStreamPrefetch * panel_columns / columns;
}

// Writes the sums of a panel's rows to c, or adds them to it.
struct StoreSums {
  static constexpr int kPanels = 1;
  static constexpr bool kTakesNarrow = true;

  __attribute__((always_inline)) Destination At(const GemmArgs& args, int64_t row,
                                                int64_t column) const {
    const int64_t columns = PanelWidth(args, column);
    return {reinterpret_cast<const unsigned char*>(args.c + row * args.ldc + column), args.ldc * 4,
            columns * 4};
  }

  // Of rows [row, row + rows). A second panel's sums are `apart` floats further.
  __attribute__((always_inline)) void Finish(const GemmArgs& args, const float* sums, int64_t,
                                             int64_t row, int64_t rows, int64_t column) const {
    RowFinish finish(args);
    float* c = args.c + row * args.ldc + column;
    const int64_t columns = PanelWidth(args, column), ldc = args.ldc;
    const bool accumulate = args.accumulate;
    for (int64_t end = row + rows; row < end; ++row, sums += kPanelColumns, c += ldc) {
      finish.Begin(row);
      for (int64_t i = 0; i < columns; i += kLanes) {
        const Mask mask = FirstLanes(columns - i);
        VecF x = finish(sums + i, column + i, mask);
        if (accumulate) x = Add(x, MaskLoadF(mask, c + i));
        MaskStoreF(mask, c + i, x);
      }
    }
  }
};

// Finishes rows of a panel of gates and of its panel of ups. T: the C++ type of the result's
// elements.
template <class T, class Act>
void FinishGatedRows(const GemmGatedArgs& gated, const float* sums, const float* up_sums,
                     int64_t row, int64_t rows, int64_t column) {
  RowFinish finish(gated.gemm);
  T* out = static_cast<T*>(gated.out) + row * gated.ldo + column;
  const int64_t ldo = gated.ldo, up_column = gated.gemm.n / 2 + column;
  const int64_t columns = PanelWidth(gated.gemm, column);
  const Mask all = FirstLanes(kLanes);
  for (int64_t end = row + rows; row < end; ++row, out += ldo) {
    finish.Begin(row);
    for (int64_t i = 0; i < columns; i += kLanes) {
      const VecF gate = finish(sums + i, column + i, all);
      const VecF up = finish(up_sums + i, up_column + i, all);
      StoreRow(out + i, Mul(Act::Apply(gate), up));
    }
    sums += kPanelColumns;
    up_sums += kPanelColumns;
  }
}

// As FinishGatedRows, for a panel without a gate. Its last columns may be missing.
template <class T, class Act>
void FinishActivatedRows(const GemmGatedArgs& args, const float* sums, const float*, int64_t row,
                         int64_t rows, int64_t column) {
  RowFinish finish(args.gemm);
  T* out = static_cast<T*>(args.out) + row * args.ldo + column;
  const int64_t columns = PanelWidth(args.gemm, column), ldo = args.ldo;
  for (int64_t end = row + rows; row < end; ++row, sums += kPanelColumns, out += ldo) {
    finish.Begin(row);
    for (int64_t i = 0; i < columns; i += kLanes) {
      const int64_t rest = columns - i;
      const VecF x = Act::Apply(finish(sums + i, column + i, FirstLanes(rest)));
      if (rest >= kLanes) {
        StoreRow(out + i, x);
      } else {
        StoreRowFirst(out + i, rest, x);
      }
    }
  }
}

using FinishGated = void (*)(const GemmGatedArgs&, const float* sums, const float* up_sums,
                             int64_t row, int64_t rows, int64_t column);

template <class T, class Act>
FinishGated FinishGatedWith(bool gated) {
  return gated ? FinishGatedRows<T, Act> : FinishActivatedRows<T, Act>;
}

template <class T>
FinishGated FinishGatedFor(const GemmGatedArgs& args) {
  switch (args.act) {
    case Activation::kSilu:
      return FinishGatedWith<T, Silu>(args.gated);
    case Activation::kGeluTanh:
      return FinishGatedWith<T, GeluTanh>(args.gated);
    case Activation::kGeluErf:
      return FinishGatedWith<T, GeluErf>(args.gated);
    case Activation::kRelu:
      return FinishGatedWith<T, Relu>(args.gated);
  }
  return nullptr;
}

// Panels: two where there is a gate, else one.
template <int Panels>
struct StoreGated {
  static constexpr int kPanels = Panels;
  static constexpr bool kTakesNarrow = false;
  const GemmGatedArgs& gated;
  FinishGated finish;

  __attribute__((always_inline)) Destination At(const GemmArgs& args, int64_t row,
                                                int64_t column) const {
    const int64_t element = gated.out_dtype == DType::kFloat32 ? 4 : 2;
    return {static_cast<const unsigned char*>(gated.out) + (row * gated.ldo + column) * element,
            gated.ldo * element, PanelWidth(args, column) * element};
  }

  __attribute__((always_inline)) void Finish(const GemmArgs&, const float* sums, int64_t apart,
                                             int64_t row, int64_t rows, int64_t column) const {
    finish(gated, sums, sums + apart, row, rows, column);
  }
};

// Adds the adapters' products to the sums of rows [row, row + rows) of a panel.
static AS_ALWAYS_INLINE void AddLowRanks(const GemmArgs& args, int64_t panel, int64_t row,
                                         int64_t rows, float* sums) {
  const int64_t begin = args.first_row + row, end = begin + rows;
  for (int64_t i = 0; i < args.num_low_rank; ++i) {
    const LowRank& low = args.low_rank[i];
    if (low.row_begin >= end) break;
    if (low.row_end <= begin || panel < low.panel_begin || panel >= low.panel_end) continue;
    const int64_t from = Higher(low.row_begin, begin), to = Lower(low.row_end, end);
    args.add_low_rank(low, from, to - from, panel, sums + (from - begin) * kPanelColumns);
  }
}

// Runs sums_of(panel, row, rows, sums, destination) for each block of rows of each of this call's
// panels, and finishes the sums with `store`. kRows: of a block.
template <int64_t kRows = kGemmRows, class Store, class SumsOf>
static AS_ALWAYS_INLINE void ForEachRowBlock(const GemmArgs& args, const Store& store,
                                             SumsOf sums_of) {
  alignas(64) float sums[Store::kPanels * kRows * kPanelColumns];
  const int64_t apart = args.n / kPanelColumns / Store::kPanels;
  for (int64_t p = args.panel_begin; p < args.panel_end; ++p) {
    for (int64_t row = 0; row < args.m; row += kRows) {
      const int64_t rows = Lower(args.m - row, kRows);
      Destination destination = store.At(args, row, FirstColumn(args, p));
      for (int64_t i = 0; i < Store::kPanels; ++i) {
        float* panel_sums = sums + i * kRows * kPanelColumns;
        sums_of(p + i * apart, row, rows, panel_sums, destination);
        if (args.num_low_rank > 0) AddLowRanks(args, p + i * apart, row, rows, panel_sums);
        destination = {};  // The first panel has fetched it.
      }
      store.Finish(args, sums, kRows * kPanelColumns, row, rows, FirstColumn(args, p));
    }
  }
}

// Kernel::Run(args, store) computes the sums of a GEMM and finishes them with `store`.
template <class Kernel>
void GemmGated(const GemmGatedArgs& args) noexcept {
  const bool floats = args.out_dtype == DType::kFloat32;
  const FinishGated finish = floats ? FinishGatedFor<float>(args) : FinishGatedFor<uint16_t>(args);
  if (args.gated) {
    Kernel::Run(args.gemm, StoreGated<2>{args, finish});
  } else {
    Kernel::Run(args.gemm, StoreGated<1>{args, finish});
  }
}

template <class Kernel>
void Gemm(const GemmArgs& args) noexcept {
  Kernel::Run(args, StoreSums());
}

// Puts a GEMM and its gated form into the table.
template <class Kernel>
static AS_ALWAYS_INLINE void FillGemm(KernelTable& table, DType weight, DType activation) {
  table.gemm[static_cast<int>(weight)][static_cast<int>(activation)] = Gemm<Kernel>;
  table.gemm_gated[static_cast<int>(weight)][static_cast<int>(activation)] = GemmGated<Kernel>;
}

// Sets the rows of A that the tile reads: gathered, or in place where that costs nothing.
// Element: how A is stored.
template <class Element, class Dot>
static AS_ALWAYS_INLINE void PlaceRows(const Element* a, int64_t lda, int64_t rows, float* gathered,
                                       TileArgs<typename Dot::A>* tile) {
  if constexpr (sizeof(typename Dot::A) == sizeof(float)) {
    if (rows > 1 || sizeof(Element) != sizeof(float)) {
      const int64_t k = tile->groups * Dot::kGroup;
      GatherRows(a, lda, rows, k, gathered, k);
      tile->a = gathered;
      tile->lda = k;
      return;
    }
  }
  tile->a = reinterpret_cast<const typename Dot::A*>(a);
  tile->lda = lda;
}

// `resume`: continues from the values in `sums`.
template <class Element, class Dot>
void GemmRowBlock(const GemmArgs& args, const unsigned char* panel, int64_t columns,
                  int64_t row_begin, int64_t rows, float* sums, const Destination& destination,
                  bool resume = false) {
  alignas(64) float gathered[kTileRows * kGemmGroups * Dot::kGroup];
  const int64_t groups_total = args.k / Dot::kGroup;
  const int64_t stride = args.panel_columns * kLaneBytes;
  const bool streams = rows <= TileShape<Dot>::kStreamRows;
  const int64_t fitting = !streams && rows <= kGemmFewRows ? kGemmFewGroups : kGemmGroups;
  // A product that resumes, an adapter's, is short, and the adapter's next panel follows in memory.
  // Before that panel is read, much other data passes through the cache, so fetching beyond it does
  // not pay.
  const int64_t block = resume ? Lower(groups_total, fitting) : fitting;
  int64_t group = 0;
  do {
    TileArgs<typename Dot::A> tile;
    tile.groups = Lower(groups_total - group, block);
    tile.b = panel + group * stride;
    tile.b_stride = stride;
    tile.ldc = kPanelColumns;
    tile.resume = resume || group > 0;
    for (int64_t r = 0; r < rows;) {
      const int64_t tile_rows = TileShape<Dot>::NextRows(rows - r);
      const Element* a =
          static_cast<const Element*>(args.a) + (row_begin + r) * args.lda + group * Dot::kGroup;
      PlaceRows<Element, Dot>(a, args.lda, tile_rows, gathered, &tile);
      if (streams && !resume) {
        tile.fetch = {tile.b + StreamAhead(columns, args.panel_columns), stride};
      } else if (IsStrip(args)) {  // whose lines are `stride` apart
        tile.fetch = {tile.b + block * stride, r == 0 ? stride : 0};
      } else {
        tile.fetch = FetchShare(tile.b + block * stride, tile.groups * stride, rows, r, tile_rows,
                                tile.groups, columns, TileVecs(static_cast<int>(tile_rows)));
      }
      tile.c = sums + r * kPanelColumns;
      if (group == 0) destination.FetchRows(r, tile_rows);
      TileRows<Dot>(tile_rows, tile, columns);
      r += tile_rows;
    }
    group += tile.groups;
  } while (group < groups_total);
}

template <class Element, class Dot>
void AddLowRank(const LowRank& low, int64_t row, int64_t rows, int64_t panel,
                float* sums) noexcept {
  GemmArgs args{};
  args.a = low.a;
  args.lda = low.lda;
  args.k = low.k;
  const unsigned char* b = static_cast<const unsigned char*>(low.b) +
                           (panel - low.panel_begin) * (low.k / Dot::kGroup) * kPanelStride;
  GemmRowBlock<Element, Dot>(args, b, kPanelColumns, row, rows, sums, {}, /*resume=*/true);
}

// Element: how A is stored.
template <class Element, class Dot>
struct GemmPlain {
  template <class Store>
  static AS_ALWAYS_INLINE void Run(const GemmArgs& args, const Store& store) {
    ForEachRowBlock(
        args, store,
        [&](int64_t p, int64_t row, int64_t rows, float* sums, const Destination& destination) {
          const int64_t lanes = p * (args.k / Dot::kGroup) * args.panel_columns + args.strip_begin;
          const unsigned char* panel =
              static_cast<const unsigned char*>(args.w) + lanes * kLaneBytes;
          // Whole vectors: the panel is padded with zeros.
          const int64_t columns = PanelWidth(args, FirstColumn(args, p));
          GemmRowBlock<Element, Dot>(args, panel, WholeVecs(columns), row, rows, sums, destination);
        });
  }
};

// float32 A, weights of float16. Few rows widen them in their tiles. For many, a block of the panel
// is widened once; its products are those of a panel of float32.
struct GemmHalf {
  static constexpr int64_t kWideGroups = 128;  // 64 KiB of float32, in the second-level cache

  // The first `columns` of `groups` pairs, as rows of kPanelColumns.
  static void Widen(const unsigned char* pairs, int64_t stride, int64_t groups, int64_t columns,
                    float* wide) {
    for (int64_t g = 0; g < groups; ++g, pairs += stride, wide += 2 * kPanelColumns) {
      for (int64_t i = 0; i < columns; i += kLanes) {
        const VecI pair = LoadI(pairs + i * kLaneBytes);
        StoreF(wide + i, HalfLow(pair));
        StoreF(wide + kPanelColumns + i, HalfHigh(pair));
      }
    }
  }

  template <class Store>
  static AS_ALWAYS_INLINE void Run(const GemmArgs& args, const Store& store) {
    if (args.m <= kGemmFewRows || args.k == 0) {
      return GemmPlain<float, DotHalfPair>::Run(args, store);
    }
    alignas(64) float wide[kWideGroups * 2 * kPanelColumns];
    ForEachRowBlock(
        args, store,
        [&](int64_t p, int64_t row, int64_t rows, float* sums, const Destination& destination) {
          const int64_t groups = args.k / 2, stride = args.panel_columns * kLaneBytes;
          const unsigned char* panel = static_cast<const unsigned char*>(args.w) +
                                       p * groups * stride + args.strip_begin * kLaneBytes;
          const int64_t columns = WholeVecs(PanelWidth(args, FirstColumn(args, p)));
          GemmArgs part = args;
          part.panel_columns = kPanelColumns;
          for (int64_t g = 0; g < groups; g += kWideGroups) {
            const int64_t count = Lower(groups - g, kWideGroups);
            Widen(panel + g * stride, stride, count, columns, wide);
            part.a = static_cast<const float*>(args.a) + 2 * g;
            part.k = 2 * count;
            GemmRowBlock<float, DotFloat>(part, reinterpret_cast<const unsigned char*>(wide),
                                          columns, row, rows, sums,
                                          g > 0 ? Destination() : destination, /*resume=*/g > 0);
          }
        });
  }
};

}  // namespace
}  // namespace allspark::kernels
