// GEMM over packed panels of 64 columns. A block of the panel's K stays in the cache while a block of rows
// passes over it in register tiles; partial sums wait in a small float32 scratch between K blocks,
// which changes no bits. One code path for one row and for thousands.
#pragma once

#include "kernels/cpu/tile.inl"

namespace allspark::kernels {
namespace {

// Rows whose partial sums wait together, and lanes of K per block: 64 KiB of a panel.
constexpr int64_t kGemmRows = 48;
constexpr int64_t kGemmGroups = 256;
// How far one row alone, which streams the panel, fetches ahead. Tiles of several rows fetch what the
// next K block will need.
constexpr int64_t kStreamPrefetch = 4096;
constexpr int64_t kPanelStride = kPanelColumns * kLaneBytes;

// A block of bfloat16 rows as float32.
AS_ALWAYS_INLINE void ExpandRows(const uint16_t* a, int64_t lda, int64_t rows, int64_t k, float* out,
                                 int64_t ldo) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint16_t* from = a + r * lda;
    float* to = out + r * ldo;
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) StoreF(to + i, LoadBf16(from + i));
    for (; i < k; ++i) to[i] = ToFloat(BFloat16{from[i]});
  }
}

// c = sums + bias (+ c) for one row of a panel.
AS_ALWAYS_INLINE void FinishRow(const GemmArgs& args, const float* sums, int64_t row, int64_t column) {
  float* c = args.c + row * args.ldc + column;
  const int64_t columns = args.n - column < kPanelColumns ? args.n - column : kPanelColumns;
  for (int64_t i = 0; i < columns; i += kLanes) {
    const Mask mask = FirstLanes(columns - i);
    VecF x = LoadF(sums + i);
    if (args.bias != nullptr) x = Add(x, MaskLoadF(mask, args.bias + column + i));
    if (args.accumulate) x = Add(x, MaskLoadF(mask, c + i));
    MaskStoreF(mask, c + i, x);
  }
}

// Element: how A is stored.
template <class Element, class Dot>
void GemmRowBlock(const GemmArgs& args, const unsigned char* panel, int64_t columns, int64_t row_begin,
                  int64_t rows, float* sums) {
  using A = typename Dot::A;
  constexpr bool kExpand = sizeof(Element) != sizeof(A);
  alignas(64) float expanded[kExpand ? kTileRows * kGemmGroups * Dot::kGroup : 1];
  const int64_t groups_total = args.k / Dot::kGroup;
  int64_t group = 0;
  do {
    const int64_t left = groups_total - group;
    const int64_t groups = left < kGemmGroups ? left : kGemmGroups;
    TileArgs<A> tile;
    tile.b = panel + group * kPanelStride;
    tile.b_stride = kPanelStride;
    tile.groups = groups;
    tile.ldc = kPanelColumns;
    tile.resume = group > 0;
    tile.prefetch = rows == 1 ? kStreamPrefetch : groups * kPanelStride;
    for (int64_t r = 0; r < rows;) {
      const int64_t tile_rows = NextTileRows(rows - r);
      const Element* a =
          static_cast<const Element*>(args.a) + (row_begin + r) * args.lda + group * Dot::kGroup;
      if constexpr (kExpand) {
        tile.lda = groups * Dot::kGroup;
        ExpandRows(a, args.lda, tile_rows, tile.lda, expanded, tile.lda);
        tile.a = expanded;
      } else {
        tile.lda = args.lda;
        tile.a = a;
      }
      tile.c = sums + r * kPanelColumns;
      TileRows<Dot>(tile_rows, tile, columns);
      r += tile_rows;
    }
    group += groups;
  } while (group < groups_total);
}

template <class Element, class Dot>
void Gemm(const GemmArgs& args, Stream) noexcept {
  alignas(64) float sums[kGemmRows * kPanelColumns];
  for (int64_t p = args.panel_begin; p < args.panel_end; ++p) {
    const int64_t column = p * kPanelColumns;
    const unsigned char* panel =
        static_cast<const unsigned char*>(args.w) + p * (args.k / Dot::kGroup) * kPanelStride;
    // Whole vectors: the panel is padded with zeros.
    const int64_t wanted = args.n - column < kPanelColumns ? args.n - column : kPanelColumns;
    const int64_t columns = (wanted + kLanes - 1) / kLanes * kLanes;
    for (int64_t row = 0; row < args.m; row += kGemmRows) {
      const int64_t rows = args.m - row < kGemmRows ? args.m - row : kGemmRows;
      GemmRowBlock<Element, Dot>(args, panel, columns, row, rows, sums);
      for (int64_t r = 0; r < rows; ++r) FinishRow(args, sums + r * kPanelColumns, row + r, column);
    }
  }
}

}  // namespace
}  // namespace allspark::kernels
