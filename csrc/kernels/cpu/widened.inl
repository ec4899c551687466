// GEMM over quantised panels with float activations. The integers of a group are widened exactly,
// and its products are a chain of fused multiply-adds, which is then scaled and added to the sums
// of the groups before.
//
// A block of the panel is widened once for all rows that pass over it, and the tiles of tile.inl do
// the rest. On x86-64, where products are of float32, a tile of few rows widens as it multiplies.
#pragma once

#include "kernels/cpu/quantized.inl"

namespace allspark::kernels {
namespace {

// Input features per widened block: 16 KiB of bfloat16, 32 of float32.
constexpr int64_t kWideBlock = 128;

// 2^23, as bits and as a float. Adding an integer u < 2^23 to the bits gives the float 2^23 + u.
constexpr int32_t kMagicBits = 0x4b000000;
constexpr float kMagic = 0x1p23f;

// The element at bit `kShift` of every stored lane, less its zero point, as float32: exact.
// `magic_zero` is kMagic + zero.
template <int kBits, int kShift>
static AS_ALWAYS_INLINE VecF Widen(VecI lanes, VecF magic_zero) {
  const VecI u = And(ShiftRight<kShift>(lanes), Set1Int((1 << kBits) - 1));
  return Sub(AsFloat(Or(u, Set1Int(kMagicBits))), magic_zero);
}

// The second operand of Widen for V vectors of columns. zeros null: all are symmetric_zero.
template <int V>
static AS_ALWAYS_INLINE void MagicZeros(const uint8_t* zeros, int32_t symmetric_zero,
                                        VecF (&out)[V]) {
  AS_UNROLL for (int v = 0; v < V; ++v) {
    const VecI point = zeros == nullptr ? Set1Int(symmetric_zero) : LoadBytes(zeros + v * kLanes);
    out[v] = Add(Set1(kMagic), IntToFloat(point));
  }
}

// Stores the widened elements k and k + 1 of a lane as the tile reads them.
static AS_ALWAYS_INLINE void StoreWide(DotFloat, unsigned char* out, VecF even, VecF odd) {
  StoreF(reinterpret_cast<float*>(out), even);
  StoreF(reinterpret_cast<float*>(out + kPanelStride), odd);
}
// Integers of magnitude below 256 are exact in bfloat16.
template <class Dot>
static AS_ALWAYS_INLINE void StoreWide(Dot, unsigned char* out, VecF even, VecF odd) {
  StoreI(out, Or(ShiftRight<16>(AsInt(even)), And(AsInt(odd), Set1Int(-65536))));
}

constexpr int kPanelVecs = kPanelStride / kVecBytes;

// Widens kVecs vectors of `count` k of a panel to [count / Dot::kGroup][64] lanes, and fetches the
// data after them. zeros null: all are symmetric_zero.
template <int kBits, class Dot, int kVecs = kPanelVecs>
void WidenIntegers(const unsigned char* from, const uint8_t* zeros, int32_t symmetric_zero,
                   int64_t count, unsigned char* out) {
  constexpr int64_t kStep = 32 / kBits;                      // k per stored lane
  constexpr int64_t kPair = 2 / Dot::kGroup * kPanelStride;  // bytes of two k
  VecF zero[kVecs];
  MagicZeros<kVecs>(zeros, symmetric_zero, zero);
  for (int64_t k = 0; k < count; k += kStep) {
    AS_UNROLL for (int v = 0; v < kVecs; ++v) {
      const unsigned char* lanes = from + v * kVecBytes;
      unsigned char* to = out + v * kVecBytes;
      PrefetchStream(lanes + kStreamPrefetch);
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

// Stores the pairs of bfloat16 k, k + 1 and k + 2, k + 3 of a lane as the tile reads them.
static AS_ALWAYS_INLINE void StorePairs(DotFloat, unsigned char* out, VecI early, VecI late) {
  StoreWide(DotFloat(), out, PairLow(early), PairHigh(early));
  StoreWide(DotFloat(), out + 2 * kPanelStride, PairLow(late), PairHigh(late));
}
template <class Dot>
static AS_ALWAYS_INLINE void StorePairs(Dot, unsigned char* out, VecI early, VecI late) {
  StoreI(out, early);
  StoreI(out + kPanelStride, late);
}

// The same for a form that LooksUp. kZeros: zero points differ.
template <bool kZeros, class Dot, int kVecs = kPanelVecs>
void WidenNibbles(const unsigned char* from, const uint8_t* zeros, const uint16_t* numbers,
                  int64_t count, unsigned char* out);
#if defined(AS_VEC_LOOKS_UP_PAIRS16)
template <bool kZeros, class Dot, int kVecs>
void WidenNibbles(const unsigned char* from, const uint8_t* zeros, const uint16_t* numbers,
                  int64_t count, unsigned char* out) {
  const VecI table = LoadI(numbers);
  VecI zero[kVecs];
  AS_UNROLL for (int v = 0; v < kVecs; ++v) {
    const VecI point = kZeros ? LoadBytes(zeros + v * kLanes) : Set1Int(0);
    zero[v] = Or(point, ShiftLeft<16>(point));
  }
  for (int64_t k = 0; k < count; k += 8) {
    AS_UNROLL for (int v = 0; v < kVecs; ++v) {
      PrefetchStream(from + v * kVecBytes + kStreamPrefetch);
      const VecI x = LoadI(from + v * kVecBytes);
      VecI low[2], high[2];
      NibblePairs<kZeros>(x, false, table, zero[v], &low[0], &high[0]);
      NibblePairs<kZeros>(x, true, table, zero[v], &low[1], &high[1]);
      StorePairs(Dot(), out + v * kVecBytes, low[0], low[1]);
      StorePairs(Dot(), out + 4 / Dot::kGroup * kPanelStride + v * kVecBytes, high[0], high[1]);
    }
    from += kPanelStride;
    out += 8 / Dot::kGroup * kPanelStride;
  }
}
#endif

template <class Dot, int kVecs = kPanelVecs>
void WidenFloat8(const unsigned char* from, int64_t count, unsigned char* out) {
  for (int64_t k = 0; k < count; k += 4) {
    for (int64_t line = 0; line < kVecs * kVecBytes; line += kVecBytes) {
      PrefetchStream(from + line + kStreamPrefetch);
      const VecI x = LoadI(from + line);
      StorePairs(Dot(), out + line, Float8Pairs(x, 0), Float8Pairs(x, 1));
    }
    from += kPanelStride;
    out += 4 / Dot::kGroup * kPanelStride;
  }
}

// kVecs vectors from `column` on of the block of `count` k that begins with element k of the panel.
template <Form kForm, class Dot, int kVecs>
static AS_ALWAYS_INLINE void WidenColumns(const QuantPanel& panel, const WeightScales& scales,
                                          const uint16_t* numbers, int64_t k, int64_t count,
                                          int64_t column, unsigned char* out) {
  const int64_t lanes = column * kLaneBytes;
  const unsigned char* from = panel.w + k * LowBytes(kForm) + lanes;
  const uint8_t* zero =
      panel.zero == nullptr ? nullptr : panel.zero + k / scales.group_size * kPanelColumns + column;
  out += lanes;
  if constexpr (kForm == Form::kFloat8) {
    WidenFloat8<Dot, kVecs>(from, count, out);
  } else if constexpr (LooksUp(kForm)) {
    if (zero != nullptr) {
      WidenNibbles<true, Dot, kVecs>(from, zero, numbers, count, out);
    } else {
      WidenNibbles<false, Dot, kVecs>(from, zero, numbers, count, out);
    }
  } else if constexpr (kForm == Form::kBytes || kForm == Form::kNibbles) {
    WidenIntegers<LowBits(kForm), Dot, kVecs>(from, zero, panel.symmetric_zero, count, out);
  } else {
    alignas(64) unsigned char bytes[kWideBlock * kPanelColumns];
    alignas(16) uint8_t table[16];
    if (kForm == Form::kTable) ByteTable(scales.table, table);
    Spread<kForm>(from, panel.high == nullptr ? nullptr : panel.high + k * kHighBytes + lanes,
                  table, count, kVecs * kLanes, bytes);
    WidenIntegers<8, Dot, kVecs>(bytes, zero, panel.symmetric_zero, count, out);
  }
}

// All of the panel's columns. numbers: NibbleNumbers.
template <Form kForm, class Dot>
static AS_ALWAYS_INLINE void WidenBlock(const QuantPanel& panel, const WeightScales& scales,
                                        const uint16_t* numbers, int64_t k, int64_t count,
                                        unsigned char* out) {
  if (panel.columns == kPanelColumns) {
    return WidenColumns<kForm, Dot, kPanelVecs>(panel, scales, numbers, k, count, 0, out);
  }
  for (int64_t column = 0; column < panel.columns; column += kLanes) {
    WidenColumns<kForm, Dot, 1>(panel, scales, numbers, k, count, column, out);
  }
}

// The sum of a row's elements, `count` of them: whole vectors. In lanes, then a fixed tree.
template <class Element>
static AS_ALWAYS_INLINE float SumOf(const Element* a, int64_t count) {
  VecF sum = Zero();
  for (int64_t i = 0; i < count; i += kLanes) sum = Add(sum, LoadFloats(a + i));
  return ReduceAdd(sum);
}

// Adds the sums of group number `index`, times its scales, to c.
static AS_ALWAYS_INLINE void AddScaledGroup(const QuantPanel& panel, int64_t index, int64_t rows,
                                            const float* sums, float* c) {
  for (int64_t i = 0; i < panel.columns; i += kLanes) {
    VecF scale[1];
    LoadScales<1>(panel.scale, index, i, scale);
    for (int64_t r = 0; r < rows; ++r) {
      float* sum = c + r * kPanelColumns + i;
      StoreF(sum, Fma(LoadF(sums + r * kPanelColumns + i), scale[0], LoadF(sum)));
    }
  }
}

// AddOffsets of float activations.
template <class Element>
static AS_ALWAYS_INLINE void AddWideOffsets(const GemmArgs& args, const QuantPanel& panel,
                                            int64_t row_begin, int64_t rows, float* c) {
  if (panel.offset.at == nullptr) return;
  const int64_t size = args.scales.group_size;
  AddOffsets(panel, /*shift=*/0, args.k / size, rows, c, [&](int64_t row, int64_t index) {
    return SumOf(static_cast<const Element*>(args.a) + (row_begin + row) * args.lda + index * size,
                 size);
  });
}

// Whether a tile of few rows widens the weights itself. A row then takes half as long (Zen 4
// without AVX-512): storing a block and reading it back costs as much as the row's products.
template <class Dot>
constexpr bool WidensInTiles(Form form) {
  return kLanes >= 8 && sizeof(typename Dot::A) == sizeof(float) &&
         (form == Form::kBytes || form == Form::kNibbles || LooksUp(form));
}

// The most rows of such a tile. Six take as long either way.
constexpr int kWideningRows = 4;
// Its vectors of columns. On AVX2, of one row, too, since constants take registers.
constexpr int WideningVecs(int rows) { return rows <= 2 ? 4 : TileVecs(rows); }

// The operands of such a tile.
struct WideningArgs {
  const float* a;
  int64_t lda;
  const unsigned char* b;
  const uint8_t* zero;  // null: all are symmetric_zero
  int32_t symmetric_zero;
  const uint16_t* numbers;  // of a form that LooksUp: NibbleNumbers
  int64_t count;            // of k
  float* c;                 // [rows][64]
  bool resume;              // continue from the values in c; otherwise from zero
  Fetch fetch;
};

// One byte of every lane, in one operation.
template <int kByte>
static AS_ALWAYS_INLINE VecI ByteOfLanes(VecI x) {
  alignas(16) static constexpr uint8_t kPlace[2][16] = {
      {1, 128, 128, 128, 5, 128, 128, 128, 9, 128, 128, 128, 13, 128, 128, 128},
      {2, 128, 128, 128, 6, 128, 128, 128, 10, 128, 128, 128, 14, 128, 128, 128}};
  if constexpr (kByte == 0) {
    return And(x, Set1Int(255));
  } else if constexpr (kByte == 3) {
    return ShiftRight<24>(x);
  } else {
    return LookUp(x, LoadTable(kPlace[kByte - 1]));
  }
}

// Adds the products of one k.
template <int R, int V>
static AS_ALWAYS_INLINE void AddProducts(const float* a, int64_t lda, const VecF (&w)[V],
                                         VecF (&acc)[R][V]) {
  AS_UNROLL for (int r = 0; r < R; ++r) {
    const VecF x = Set1(a[r * lda]);
    AS_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = Fma(x, w[v], acc[r][v]);
  }
}

// Of the k that has this byte of the lanes.
template <int kByte, int R, int V>
static AS_ALWAYS_INLINE void AddWidened(const float* a, int64_t lda, const VecI (&bytes)[V],
                                        const VecF (&magic_zero)[V], VecF (&acc)[R][V]) {
  VecF w[V];
  AS_UNROLL for (int v = 0; v < V; ++v) {
    const VecI u = Or(ByteOfLanes<kByte>(bytes[v]), Set1Int(kMagicBits));
    w[v] = Sub(AsFloat(u), magic_zero[v]);
  }
  AddProducts<R, V>(a, lda, w, acc);
}

// Of four k.
template <int R, int V>
static AS_ALWAYS_INLINE void AddFourWidened(const float* a, int64_t lda, const VecI (&bytes)[V],
                                            const VecF (&magic_zero)[V], VecF (&acc)[R][V]) {
  AddWidened<0, R, V>(a, lda, bytes, magic_zero, acc);
  AddWidened<1, R, V>(a + 1, lda, bytes, magic_zero, acc);
  AddWidened<2, R, V>(a + 2, lda, bytes, magic_zero, acc);
  AddWidened<3, R, V>(a + 3, lda, bytes, magic_zero, acc);
}

// The sums that a tile of WideningArgs continues from, and where it leaves them.
template <int R, int V>
static AS_ALWAYS_INLINE void LoadSums(const WideningArgs& args, VecF (&acc)[R][V]) {
  AS_UNROLL for (int r = 0; r < R; ++r) {
    AS_UNROLL for (int v = 0; v < V; ++v) {
      acc[r][v] = args.resume ? LoadF(args.c + r * kPanelColumns + v * kLanes) : Zero();
    }
  }
}
template <int R, int V>
static AS_ALWAYS_INLINE void KeepSums(const WideningArgs& args, const VecF (&acc)[R][V]) {
  AS_UNROLL for (int r = 0; r < R; ++r) {
    AS_UNROLL for (int v = 0; v < V; ++v) {
      StoreF(args.c + r * kPanelColumns + v * kLanes, acc[r][v]);
    }
  }
}

// A tile of a form that LooksUp. kZeros: zero points differ.
template <bool kZeros, int R, int V>
void LookingUpTile(const WideningArgs& args);
#if defined(AS_VEC_LOOKS_UP_FLOATS)
// Of the k that has the four bits at bit kShift of the lanes.
template <int kShift, bool kZeros, int R, int V>
static AS_ALWAYS_INLINE void AddLookedUp(const float* a, int64_t lda, const VecI (&lanes)[V],
                                         VecF numbers, const VecF (&zero)[V], VecF (&acc)[R][V]) {
  VecF w[V];
  AS_UNROLL for (int v = 0; v < V; ++v) {
    w[v] = LookUpFloats(numbers, ShiftRight<kShift>(lanes[v]));
    if (kZeros) w[v] = Sub(w[v], zero[v]);
  }
  AddProducts<R, V>(a, lda, w, acc);
}

template <bool kZeros, int R, int V>
void LookingUpTile(const WideningArgs& args) {
  VecF acc[R][V], zero[V];
  LoadSums<R, V>(args, acc);
  AS_UNROLL for (int v = 0; v < V; ++v) {
    zero[v] = kZeros ? IntToFloat(LoadBytes(args.zero + v * kLanes)) : Zero();
  }
  const VecF numbers = LoadBf16(args.numbers);
  const float* a = args.a;
  const unsigned char* b = args.b;
  const int64_t lda = args.lda;
  Fetch fetch = args.fetch;
  for (const float* end = a + args.count; a < end; a += 8, b += kPanelStride) {
    FetchStep<V>(fetch);
    VecI x[V];
    AS_UNROLL for (int v = 0; v < V; ++v) x[v] = LoadI(b + v * kVecBytes);
    AddLookedUp<0, kZeros, R, V>(a, lda, x, numbers, zero, acc);
    AddLookedUp<8, kZeros, R, V>(a + 1, lda, x, numbers, zero, acc);
    AddLookedUp<16, kZeros, R, V>(a + 2, lda, x, numbers, zero, acc);
    AddLookedUp<24, kZeros, R, V>(a + 3, lda, x, numbers, zero, acc);
    AddLookedUp<4, kZeros, R, V>(a + 4, lda, x, numbers, zero, acc);
    AddLookedUp<12, kZeros, R, V>(a + 5, lda, x, numbers, zero, acc);
    AddLookedUp<20, kZeros, R, V>(a + 6, lda, x, numbers, zero, acc);
    AddLookedUp<28, kZeros, R, V>(a + 7, lda, x, numbers, zero, acc);
  }
  KeepSums<R, V>(args, acc);
}
#endif

// A tile of other forms.
template <int kBits, bool kZeros, int R, int V>
void WideningTile(const WideningArgs& args) {
  VecF acc[R][V], zero[V];
  LoadSums<R, V>(args, acc);
  MagicZeros<V>(kZeros ? args.zero : nullptr, args.symmetric_zero, zero);
  const float* a = args.a;
  const unsigned char* b = args.b;
  const int64_t lda = args.lda;
  Fetch fetch = args.fetch;
  for (const float* end = a + args.count; a < end; b += kPanelStride) {
    FetchStep<V>(fetch);
    VecI bytes[V];
    AS_UNROLL for (int v = 0; v < V; ++v) {
      bytes[v] = LoadI(b + v * kVecBytes);
      if (kBits == 4) bytes[v] = LowNibbles(bytes[v]);
    }
    AddFourWidened<R, V>(a, lda, bytes, zero, acc);
    a += 4;
    if constexpr (kBits == 4) {
      AS_UNROLL for (int v = 0; v < V; ++v) bytes[v] = HighNibbles(LoadI(b + v * kVecBytes));
      AddFourWidened<R, V>(a, lda, bytes, zero, acc);
      a += 4;
    }
  }
  KeepSums<R, V>(args, acc);
}

template <Form kForm, bool kZeros, int R, int V>
static AS_ALWAYS_INLINE void WidenedTile(const WideningArgs& args) {
  if constexpr (LooksUp(kForm)) {
    LookingUpTile<kZeros, R, V>(args);
  } else {
    WideningTile<LowBits(kForm), kZeros, R, V>(args);
  }
}

// All columns, as TileColumnsFrom.
template <Form kForm, int R, int V>
static AS_ALWAYS_INLINE void WideningColumns(WideningArgs& args, int64_t columns) {
  for (; columns >= V * kLanes; columns -= V * kLanes) {
    if (args.zero == nullptr) {
      WidenedTile<kForm, false, R, V>(args);
    } else {
      WidenedTile<kForm, true, R, V>(args);
      args.zero += V * kLanes;
    }
    args.fetch.at += args.count * LowBits(kForm) / 32 * args.fetch.step;
    args.b += V * kVecBytes;
    args.c += V * kLanes;
  }
  if constexpr (V > 1) WideningColumns<kForm, R, V / 2>(args, columns);
}

// Of GemmWidenedRows the block of k from `k` to `next`, for few rows.
template <class Element, Form kForm>
static AS_ALWAYS_INLINE void AddWideningBlock(const GemmArgs& args, const QuantPanel& panel,
                                              int64_t row_begin, int64_t rows, int64_t k,
                                              int64_t next, const uint16_t* numbers,
                                              float* gathered, float* partial) {
  const int64_t count = next - k, size = args.scales.group_size;
  const int64_t bytes = count * LowBytes(kForm);
  GatherRows(static_cast<const Element*>(args.a) + row_begin * args.lda + k, args.lda, rows, count,
             gathered, count);
  WideningArgs tile;
  tile.a = gathered;
  tile.lda = count;
  tile.b = panel.w + k * LowBytes(kForm);
  tile.zero = panel.zero == nullptr ? nullptr : panel.zero + k / size * kPanelColumns;
  tile.symmetric_zero = panel.symmetric_zero;
  tile.numbers = numbers;
  tile.count = count;
  tile.c = partial;
  tile.resume = k % size != 0;
  tile.fetch = FetchShare(tile.b + bytes, bytes, rows, 0, rows, bytes / kPanelStride, panel.columns,
                          WideningVecs(static_cast<int>(rows)));
  WithRows<kWideningRows>(
      rows, [&tile, &panel ]<int R>() __attribute__((always_inline)) {
        WideningColumns<kForm, R, WideningVecs(R)>(tile, panel.columns);
      });
}

template <class Element, class Dot, Form kForm>
void GemmWidenedRows(const GemmArgs& args, const QuantPanel& panel, int64_t row_begin, int64_t rows,
                     const uint16_t* numbers, unsigned char* wide, float* partial, float* c,
                     const Destination& destination) {
  alignas(64) float gathered[kTileRows * kWideBlock];
  const int64_t size = args.scales.group_size;
  for (int64_t k = 0, next; k < args.k; k = next) {
    const int64_t index = k / size, group_end = (index + 1) * size;
    next = Lower(k + kWideBlock, group_end);
    if (panel.offset.at != nullptr && k % size == 0) {
      FetchScales<kPanelColumns / kLanes>(panel.offset, index, 0);
    }
    if constexpr (WidensInTiles<Dot>(kForm)) {
      if (rows <= kWideningRows) {
        if (k == 0) destination.FetchRows(0, rows);
        AddWideningBlock<Element, kForm>(args, panel, row_begin, rows, k, next, numbers, gathered,
                                         partial);
        if (next == group_end) AddScaledGroup(panel, index, rows, partial, c);
        continue;
      }
    }
    WidenBlock<kForm, Dot>(panel, args.scales, numbers, k, next - k, wide);
    TileArgs<typename Dot::A> tile;
    tile.groups = (next - k) / Dot::kGroup;
    tile.b = wide;
    tile.b_stride = kPanelStride;
    tile.ldc = kPanelColumns;
    tile.resume = k % size != 0;
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
    if (next == group_end) AddScaledGroup(panel, index, rows, partial, c);
  }
  AddWideOffsets<Element>(args, panel, row_begin, rows, c);
}

// Element: how A is stored.
template <class Element, class Dot, Form kForm>
struct GemmWidened {
  template <class Store>
  static AS_ALWAYS_INLINE void Run(const GemmArgs& args, const Store& store) {
    alignas(64) float partial[kGemmRows * kPanelColumns] = {};
    alignas(64) uint16_t numbers[32];
    if (LooksUp(kForm)) NibbleNumbers<kForm>(args.scales, numbers);
    alignas(64) unsigned char wide[kWideBlock / Dot::kGroup * kPanelStride];
    ForEachRowBlock(
        args, store,
        [&](int64_t p, int64_t row, int64_t rows, float* sums, const Destination& destination) {
          for (int64_t i = 0; i < rows * kPanelColumns; i += kLanes) StoreF(sums + i, Zero());
          GemmWidenedRows<Element, Dot, kForm>(args, PanelOf<kForm>(args, p), row, rows, numbers,
                                               wide, partial, sums, destination);
        });
  }
};

template <class Element, class Dot>
struct Widened {
  static constexpr bool kFloats = true;
  template <Form kForm>
  using Of = GemmWidened<Element, Dot, kForm>;
};

}  // namespace
}  // namespace allspark::kernels
