// The register tiles on Arm's matrix instructions. One multiplies two columns of weights by two
// rows of activations, eight bytes of K deep, and adds the four sums to a register.
//
// Sums of bytes are exact, so the bits are those of every other table. The instruction of bfloat16
// adds four products as two dot products in turn, so the bits are those of DotNative.
#pragma once

#include "kernels/cpu/quantized.inl"

namespace allspark::kernels {
namespace {

// The most rows of a tile, and its vectors of columns: 16 of 32 registers are accumulators, and
// eight more hold what the rows have in a step.
constexpr int kMmlaRows = 8;
constexpr int MmlaVecs(int rows) { return rows <= 2 ? 8 : rows <= 4 ? 4 : 2; }
// A step is two instructions deep: so many bytes of a row, and lanes of B.
constexpr int64_t kMmlaBytes = 16, kMmlaLanes = 4;

// As an intrinsic, GCC moves the sums from one register to another and back around each.
struct MmlaBytes {
  static AS_ALWAYS_INLINE void Add(VecI& sums, VecI columns, int64x2_t rows) {
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(columns), "w"(rows));
  }
};
struct MmlaBf16 {
  static AS_ALWAYS_INLINE void Add(VecI& sums, VecI columns, int64x2_t rows) {
    __asm__("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(sums) : "w"(columns), "w"(rows));
  }
};

// The sums of R rows by V vectors of columns. An odd last row is multiplied twice.
template <class Product, int R, int V>
struct MmlaSums {
  static constexpr int kPairs = (R + 1) / 2;
  // Of rows 2 p and 2 p + 1, [p][2 v + i] has columns 2 i and 2 i + 1 of vector v: [column][row].
  using Pairs = VecI[kPairs][2 * V];

  static constexpr int Second(int p) { return 2 * p + 1 < R ? 2 * p + 1 : 2 * p; }

  // From rows and to rows of 32-bit lanes, `ld` apart.
  static AS_ALWAYS_INLINE void Load(const void* from, int64_t ld, Pairs& pairs) {
    const auto* lanes = static_cast<const uint32_t*>(from);
    AS_UNROLL for (int p = 0; p < kPairs; ++p) {
      AS_UNROLL for (int v = 0; v < V; ++v) {
        const VecI first = LoadI(lanes + 2 * p * ld + v * kLanes);
        const VecI second = LoadI(lanes + Second(p) * ld + v * kLanes);
        pairs[p][2 * v] = vzip1q_u32(first, second);
        pairs[p][2 * v + 1] = vzip2q_u32(first, second);
      }
    }
  }
  static AS_ALWAYS_INLINE void Store(const Pairs& pairs, int64_t ld, void* to) {
    auto* lanes = static_cast<uint32_t*>(to);
    AS_UNROLL for (int r = 0; r < R; ++r) {
      AS_UNROLL for (int v = 0; v < V; ++v) {
        const VecI first = pairs[r / 2][2 * v], second = pairs[r / 2][2 * v + 1];
        StoreI(lanes + r * ld + v * kLanes,
               r % 2 == 0 ? vuzp1q_u32(first, second) : vuzp2q_u32(first, second));
      }
    }
  }

  // One instruction deep, of which `x` has what each pair of rows has.
  static AS_ALWAYS_INLINE void Multiply(const unsigned char* b, int64_t b_stride,
                                        const int64x2_t (&x)[kPairs], Pairs& sums) {
    AS_UNROLL for (int v = 0; v < V; ++v) {
      const VecI early = LoadI(b + v * kVecBytes), late = LoadI(b + b_stride + v * kVecBytes);
      const VecI first = vzip1q_u32(early, late), second = vzip2q_u32(early, late);
      AS_UNROLL for (int p = 0; p < kPairs; ++p) {
        Product::Add(sums[p][2 * v], first, x[p]);
        Product::Add(sums[p][2 * v + 1], second, x[p]);
      }
    }
  }

  // `steps` steps from `a`, whose rows are `lda` bytes apart, and `b` on, which then point behind
  // them.
  static AS_ALWAYS_INLINE void Add(const char*& a, int64_t lda, const unsigned char*& b,
                                   int64_t b_stride, int64_t steps, Fetch& fetch, Pairs& sums) {
    for (int64_t i = 0; i < steps; ++i) {
      FetchStep<V>(fetch);
      int64x2_t early[kPairs], late[kPairs];
      AS_UNROLL for (int p = 0; p < kPairs; ++p) {
        const int64x2_t first = vreinterpretq_s64_u32(LoadI(a + 2 * p * lda));
        const int64x2_t second = vreinterpretq_s64_u32(LoadI(a + Second(p) * lda));
        early[p] = vzip1q_s64(first, second);
        late[p] = vzip2q_s64(first, second);
      }
      Multiply(b, b_stride, early, sums);
      Multiply(b + 2 * b_stride, b_stride, late, sums);
      a += kMmlaBytes;
      b += kMmlaLanes * b_stride;
    }
  }
};

// [first, second, first, second]
static AS_ALWAYS_INLINE VecI TwoTwice(const void* first, const void* second) {
  uint32x2_t x = vld1_dup_u32(static_cast<const uint32_t*>(first));
  x = vld1_lane_u32(static_cast<const uint32_t*>(second), x, 1);
  return vcombine_u32(x, x);
}

// A block of form kBytes.
template <int R, int V>
struct MmlaByteTile {
  using Sums = MmlaSums<MmlaBytes, R, V>;
  using Pairs = typename Sums::Pairs;
  static constexpr int kPairs = Sums::kPairs;

  // The scaled sums, from block.c and back.
  static AS_ALWAYS_INLINE void Begin(const ByteBlock& block, float* total) {
    if (block.fresh) {
      for (int i = 0; i < kPairs * 2 * V; ++i) StoreF(total + i * kLanes, Zero());
      return;
    }
    Pairs sums;
    Sums::Load(block.c, kPanelColumns, sums);
    AS_UNROLL for (int p = 0; p < kPairs; ++p) {
      AS_UNROLL for (int i = 0; i < 2 * V; ++i)
          StoreI(total + (p * 2 * V + i) * kLanes, sums[p][i]);
    }
  }
  static AS_ALWAYS_INLINE void End(const float* total, const ByteBlock& block) {
    Pairs sums;
    AS_UNROLL for (int p = 0; p < kPairs; ++p) {
      AS_UNROLL for (int i = 0; i < 2 * V; ++i) sums[p][i] =
          LoadI(total + (p * 2 * V + i) * kLanes);
    }
    Sums::Store(sums, kPanelColumns, block.c);
  }

  // As StartGroup.
  static AS_ALWAYS_INLINE void Start(const ByteBlock& block, int64_t group, Pairs& sums) {
    const int32_t* begin = block.a_sums + group * block.sums_per_group;
    const int32_t* end = begin + block.sums_per_group;
    AS_UNROLL for (int p = 0; p < kPairs; ++p) {
      const int64_t first = 2 * p * block.ld_sums, second = Sums::Second(p) * block.ld_sums;
      const VecI sum =
          SubInt(TwoTwice(begin + first, begin + second), TwoTwice(end + first, end + second));
      const VecI start = MulInt(sum, Set1Int(block.symmetric_zero));
      AS_UNROLL for (int v = 0; v < V; ++v) sums[p][2 * v] = sums[p][2 * v + 1] = start;
      if (block.zero == nullptr) continue;
      AS_UNROLL for (int v = 0; v < V; ++v) {
        const VecI zero = LoadBytes(ZerosAt(block, group) + v * kLanes);
        sums[p][2 * v] = MulInt(vzip1q_u32(zero, zero), sum);
        sums[p][2 * v + 1] = MulInt(vzip2q_u32(zero, zero), sum);
      }
    }
  }

  // As AddGroup.
  static AS_ALWAYS_INLINE void Add(const ByteBlock& block, int64_t group, const Pairs& sums,
                                   float* total) {
    const bool scales_columns = block.scale.at != nullptr, scales_rows = block.a_scale != nullptr;
    const float* a_scale =
        block.a_scale + (scales_rows ? (block.index + group) >> block.a_shift : 0);
    VecF columns[V], scale[2 * V];
    if (scales_columns) LoadScales<V>(block.scale, ScaleGroup(block, group), block.column, columns);
    AS_UNROLL for (int v = 0; v < V; ++v) {
      const VecF x = scales_columns ? columns[v] : Zero();
      Interleave(x, x, &scale[2 * v], &scale[2 * v + 1]);
    }
    AS_UNROLL for (int p = 0; p < kPairs; ++p) {
      const VecF row = scales_rows ? AsFloat(TwoTwice(a_scale + 2 * p * block.ld_scales,
                                                      a_scale + Sums::Second(p) * block.ld_scales))
                                   : Zero();
      AS_UNROLL for (int i = 0; i < 2 * V; ++i) {
        const VecF x = IntToFloat(sums[p][i]), before = LoadF(total);
        StoreF(total, !scales_rows      ? Fma(x, scale[i], before)
                      : !scales_columns ? Fma(x, row, before)
                                        : Fma(Mul(x, row), scale[i], before));
        total += kLanes;
      }
    }
  }

  // total: the scaled sums meanwhile, which registers have no room for. `block` is a copy, which
  // stores to memory cannot change: so that the compiler keeps it in registers.
  static void Run(const ByteBlock block, float (&total)[kPairs * 2 * V * kLanes]) {
    const auto* a = reinterpret_cast<const char*>(block.a);
    const unsigned char* b = block.b;
    Fetch fetch = block.fetch;
    Begin(block, total);
    for (int64_t group = 0; group < block.groups; ++group) {
      Pairs sums;
      if (block.first) {
        Start(block, group, sums);
      } else {
        Sums::Load(block.partial, kPanelColumns, sums);
      }
      Sums::Add(a, block.lda, b, kPanelStride, block.lanes / kMmlaLanes, fetch, sums);
      if (!block.last) return Sums::Store(sums, kPanelColumns, block.partial);
      Add(block, group, sums, total);
    }
    End(total, block);
  }
};

// All columns: in tiles of V vectors, then of half as many.
template <int R, int V>
static AS_ALWAYS_INLINE void MmlaByteColumns(ByteBlock& block, int64_t columns) {
  for (; columns >= V * kLanes; columns -= V * kLanes) {
    float total[(R + 1) / 2 * 2 * V * kLanes];
    MmlaByteTile<R, V>::Run(block, total);
    block.fetch.at += block.groups * block.lanes / kMmlaLanes * block.fetch.step;
    PassColumns(block, V * kLanes);
  }
  if constexpr (V > 1) MmlaByteColumns<R, V / 2>(block, columns);
}

// Bytes to fetch with every step of R rows. They were for steps of one lane, of TileVecs vectors.
template <int R>
static AS_ALWAYS_INLINE int64_t MmlaFetchStep(const Fetch& fetch) {
  return fetch.step * kMmlaLanes * MmlaVecs(R) / TileVecs(R);
}

// The rows of the next tile when `left` remain: as even as possible, of pairs.
static AS_ALWAYS_INLINE int64_t NextMmlaRows(int64_t left) {
  return Lower(left, 2 * CeilDiv(left, 2 * CeilDiv(left, kMmlaRows)));
}

// For GemmBytes.
struct MmlaByteTiles : ByteTiles {
  static AS_ALWAYS_INLINE bool Takes(int64_t lanes) { return lanes % kMmlaLanes == 0; }

  static AS_ALWAYS_INLINE int64_t NextRows(int64_t left, int64_t lanes) {
    return Takes(lanes) ? NextMmlaRows(left) : ByteTiles::NextRows(left, lanes);
  }

  template <Form kForm>
  static void Rows(int64_t rows, ByteBlock block, int64_t columns) {
    if (kForm != Form::kBytes || rows == 1 || !Takes(block.lanes)) {
      return ByteTileRows<kForm>(rows, block, columns);
    }
    WithRows<kMmlaRows, 2>(
        rows, [&block, columns ]<int R>() __attribute__((always_inline)) {
          block.fetch.step = MmlaFetchStep<R>(block.fetch);
          MmlaByteColumns<R, MmlaVecs(R)>(block, columns);
        });
  }
};

// bfloat16 A and B, for the callers of TileRows.
struct DotMmla {
  using A = uint16_t;
  static constexpr int64_t kGroup = 2;
};

template <>
struct TileShape<DotMmla> {
  static constexpr int64_t kStreamRows = 1;
  static AS_ALWAYS_INLINE int64_t NextRows(int64_t left) { return NextMmlaRows(left); }
};

// The first args.groups / kMmlaLanes steps.
template <int R, int V>
void MmlaTile(const TileArgs<uint16_t>& args) {
  using Sums = MmlaSums<MmlaBf16, R, V>;
  typename Sums::Pairs sums;
  if (args.resume) {
    Sums::Load(args.c, args.ldc, sums);
  } else {
    AS_UNROLL for (int p = 0; p < Sums::kPairs; ++p) {
      AS_UNROLL for (int i = 0; i < 2 * V; ++i) sums[p][i] = Set1Int(0);
    }
  }
  const auto* a = reinterpret_cast<const char*>(args.a);
  const unsigned char* b = args.b;
  Fetch fetch = args.fetch;
  Sums::Add(a, args.lda * 2, b, args.b_stride, args.groups / kMmlaLanes, fetch, sums);
  Sums::Store(sums, args.ldc, args.c);
}

// All whole vectors of columns.
template <int R, int V>
static AS_ALWAYS_INLINE void MmlaColumns(TileArgs<uint16_t>& args, int64_t& columns) {
  for (; columns >= V * kLanes; columns -= V * kLanes) {
    MmlaTile<R, V>(args);
    args.fetch.at += args.groups / kMmlaLanes * args.fetch.step;
    args.b += V * kVecBytes;
    args.c += V * kLanes;
  }
  if constexpr (V > 1) MmlaColumns<R, V / 2>(args, columns);
}

// In as many tiles as DotNative needs.
static AS_ALWAYS_INLINE void NativeRows(int64_t rows, TileArgs<uint16_t> args, int64_t columns) {
  while (rows > 0) {
    const int64_t tile_rows = TileShape<DotNative>::NextRows(rows);
    TileRows<DotNative>(tile_rows, args, columns);
    args.a += tile_rows * args.lda;
    args.c += tile_rows * args.ldc;
    rows -= tile_rows;
  }
}

template <>
void TileRows<DotMmla>(int64_t rows, const TileArgs<uint16_t>& args, int64_t columns) {
  const int64_t steps = args.groups / kMmlaLanes, rest = args.groups % kMmlaLanes;
  if (rows == 1 || steps == 0) return NativeRows(rows, args, columns);
  TileArgs<uint16_t> whole = args;
  int64_t last_columns = columns;
  WithRows<kMmlaRows, 2>(
      rows, [&whole, &last_columns ]<int R>() __attribute__((always_inline)) {
        whole.fetch.step = MmlaFetchStep<R>(whole.fetch);
        MmlaColumns<R, MmlaVecs(R)>(whole, last_columns);
      });
  if (rest > 0) {
    TileArgs<uint16_t> tail = args;
    tail.a += steps * kMmlaLanes * DotMmla::kGroup;
    tail.b += steps * kMmlaLanes * args.b_stride;
    tail.groups = rest;
    tail.resume = true;
    tail.fetch = {tail.b, 0};
    NativeRows(rows, tail, columns - last_columns);
  }
  if (last_columns > 0) {
    whole.fetch = {whole.b, 0};
    NativeRows(rows, whole, last_columns);
  }
}

}  // namespace
}  // namespace allspark::kernels
