// The register tile on Arm's matrix instructions. One multiplies two columns of weights by two rows
// of activations, eight bytes of K deep, and adds the four sums to a register. Sums of integers are
// exact, so the bits are those of every other table.
#pragma once

#include "kernels/cpu/quantized.inl"

namespace allspark::kernels {
namespace {

// The most rows of a tile, and its vectors of columns: 16 of 32 registers are accumulators, and
// eight more hold what the rows have in a step.
constexpr int kMmlaRows = 8;
constexpr int MmlaVecs(int rows) { return rows <= 2 ? 8 : rows <= 4 ? 4 : 2; }
// K of a step: two instructions deep.
constexpr int64_t kMmlaK = 16;

// As an intrinsic, GCC moves the sums from one register to another and back around each.
static AS_ALWAYS_INLINE void AddProducts(VecI& sums, VecI columns, int8x16_t rows) {
  __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(columns), "w"(rows));
}

// [first, second, first, second]
static AS_ALWAYS_INLINE VecI TwoTwice(const void* first, const void* second) {
  uint32x2_t x = vld1_dup_u32(static_cast<const uint32_t*>(first));
  x = vld1_lane_u32(static_cast<const uint32_t*>(second), x, 1);
  return vcombine_u32(x, x);
}

// R rows by V vectors of columns of form kBytes. An odd last row is multiplied twice.
template <int R, int V>
struct MmlaTile {
  static constexpr int kPairs = (R + 1) / 2;
  // Of rows 2 p and 2 p + 1, [p][2 v + i] has columns 2 i and 2 i + 1 of vector v: [column][row].
  using Pairs = VecI[kPairs][2 * V];

  static constexpr int Second(int p) { return 2 * p + 1 < R ? 2 * p + 1 : 2 * p; }

  // From rows and to rows of kPanelColumns lanes of 32 bits.
  static AS_ALWAYS_INLINE void Load(const void* from, Pairs& pairs) {
    const auto* lanes = static_cast<const uint32_t*>(from);
    AS_UNROLL for (int p = 0; p < kPairs; ++p) {
      AS_UNROLL for (int v = 0; v < V; ++v) {
        const VecI first = LoadI(lanes + 2 * p * kPanelColumns + v * kLanes);
        const VecI second = LoadI(lanes + Second(p) * kPanelColumns + v * kLanes);
        pairs[p][2 * v] = vzip1q_u32(first, second);
        pairs[p][2 * v + 1] = vzip2q_u32(first, second);
      }
    }
  }
  static AS_ALWAYS_INLINE void Store(const Pairs& pairs, void* to) {
    auto* lanes = static_cast<uint32_t*>(to);
    AS_UNROLL for (int r = 0; r < R; ++r) {
      AS_UNROLL for (int v = 0; v < V; ++v) {
        const VecI first = pairs[r / 2][2 * v], second = pairs[r / 2][2 * v + 1];
        StoreI(lanes + r * kPanelColumns + v * kLanes,
               r % 2 == 0 ? vuzp1q_u32(first, second) : vuzp2q_u32(first, second));
      }
    }
  }

  // The scaled sums, from block.c and back.
  static AS_ALWAYS_INLINE void Begin(const ByteBlock& block, float* total) {
    if (block.fresh) {
      for (int i = 0; i < kPairs * 2 * V; ++i) StoreF(total + i * kLanes, Zero());
      return;
    }
    Pairs sums;
    Load(block.c, sums);
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
    Store(sums, block.c);
  }

  // As StartGroup.
  static AS_ALWAYS_INLINE void Start(const ByteBlock& block, int64_t group, Pairs& sums) {
    const int32_t* begin = block.a_sums + group * block.sums_per_group;
    const int32_t* end = begin + block.sums_per_group;
    AS_UNROLL for (int p = 0; p < kPairs; ++p) {
      const int64_t first = 2 * p * block.ld_sums, second = Second(p) * block.ld_sums;
      const VecI sum =
          SubInt(TwoTwice(begin + first, begin + second), TwoTwice(end + first, end + second));
      const VecI start = MulInt(sum, Set1Int(block.symmetric_zero));
      AS_UNROLL for (int v = 0; v < V; ++v) sums[p][2 * v] = sums[p][2 * v + 1] = start;
      if (block.zero == nullptr) continue;
      AS_UNROLL for (int v = 0; v < V; ++v) {
        const VecI zero = LoadBytes(block.zero + ScaleAt(block, group) + v * kLanes);
        sums[p][2 * v] = MulInt(vzip1q_u32(zero, zero), sum);
        sums[p][2 * v + 1] = MulInt(vzip2q_u32(zero, zero), sum);
      }
    }
  }

  // As AddGroup.
  static AS_ALWAYS_INLINE void Add(const ByteBlock& block, int64_t group, const Pairs& sums,
                                   float* total) {
    const bool scales_columns = block.scale != nullptr, scales_rows = block.a_scale != nullptr;
    VecF scale[2 * V];
    AS_UNROLL for (int v = 0; v < V; ++v) {
      const uint16_t* at = block.scale + ScaleAt(block, group) + v * kLanes;
      const VecF x = scales_columns ? LoadScale(at, block.half) : Zero();
      Interleave(x, x, &scale[2 * v], &scale[2 * v + 1]);
    }
    const float* a_scale = block.a_scale + ((block.index + group) >> block.a_shift);
    AS_UNROLL for (int p = 0; p < kPairs; ++p) {
      const VecF row = scales_rows ? AsFloat(TwoTwice(a_scale + 2 * p * block.ld_scales,
                                                      a_scale + Second(p) * block.ld_scales))
                                   : Zero();
      AS_UNROLL for (int i = 0; i < 2 * V; ++i) {
        float* at = total + (p * 2 * V + i) * kLanes;
        const VecF x = IntToFloat(sums[p][i]), before = LoadF(at);
        StoreF(at, !scales_rows      ? Fma(x, scale[i], before)
                   : !scales_columns ? Fma(x, row, before)
                                     : Fma(Mul(x, row), scale[i], before));
      }
    }
  }

  // Eight of K, of which `x` has those of each pair of rows.
  static AS_ALWAYS_INLINE void Multiply(const unsigned char* b, const int8x16_t (&x)[kPairs],
                                        Pairs& sums) {
    AS_UNROLL for (int v = 0; v < V; ++v) {
      const VecI early = LoadI(b + v * kVecBytes), late = LoadI(b + kPanelStride + v * kVecBytes);
      const VecI first = vzip1q_u32(early, late), second = vzip2q_u32(early, late);
      AS_UNROLL for (int p = 0; p < kPairs; ++p) {
        AddProducts(sums[p][2 * v], first, x[p]);
        AddProducts(sums[p][2 * v + 1], second, x[p]);
      }
    }
  }

  // total: the scaled sums meanwhile, which registers have no room for.
  static void Run(const ByteBlock block, float (&total)[kPairs * 2 * V * kLanes]) {
    const int8_t* a = block.a;
    const unsigned char* b = block.b;
    Fetch fetch = block.fetch;
    Begin(block, total);
    for (int64_t group = 0; group < block.groups; ++group) {
      Pairs sums;
      if (block.first) {
        Start(block, group, sums);
      } else {
        Load(block.partial, sums);
      }
      for (int64_t k = 0; k < block.lanes * 4; k += kMmlaK) {
        FetchStep<V>(fetch);
        int8x16_t early[kPairs], late[kPairs];
        AS_UNROLL for (int p = 0; p < kPairs; ++p) {
          const int64x2_t first = vreinterpretq_s64_s8(vld1q_s8(a + 2 * p * block.lda));
          const int64x2_t second = vreinterpretq_s64_s8(vld1q_s8(a + Second(p) * block.lda));
          early[p] = vreinterpretq_s8_s64(vzip1q_s64(first, second));
          late[p] = vreinterpretq_s8_s64(vzip2q_s64(first, second));
        }
        Multiply(b, early, sums);
        Multiply(b + 2 * kPanelStride, late, sums);
        a += kMmlaK;
        b += 4 * kPanelStride;
      }
      if (!block.last) return Store(sums, block.partial);
      Add(block, group, sums, total);
    }
    End(total, block);
  }
};

// All columns: in tiles of V vectors, then of half as many.
template <int R, int V>
static AS_ALWAYS_INLINE void MmlaColumns(ByteBlock& block, int64_t columns) {
  for (; columns >= V * kLanes; columns -= V * kLanes) {
    float total[(R + 1) / 2 * 2 * V * kLanes];
    MmlaTile<R, V>::Run(block, total);
    block.fetch.at += block.groups * block.lanes * 4 / kMmlaK * block.fetch.step;
    PassColumns(block, V * kLanes);
  }
  if constexpr (V > 1) MmlaColumns<R, V / 2>(block, columns);
}

// 2 to R rows.
template <int R>
static AS_ALWAYS_INLINE void MmlaRows(int64_t rows, ByteBlock& block, int64_t columns) {
  if (rows == R) {
    // It was for steps of four k, of TileVecs vectors.
    block.fetch.step = block.fetch.step * (kMmlaK / 4) * MmlaVecs(R) / TileVecs(R);
    return MmlaColumns<R, MmlaVecs(R)>(block, columns);
  }
  if constexpr (R > 2) MmlaRows<R - 1>(rows, block, columns);
}

struct MmlaTiles {
  static AS_ALWAYS_INLINE bool Takes(int64_t lanes) { return lanes * 4 % kMmlaK == 0; }

  static AS_ALWAYS_INLINE bool Spreads(int64_t rows) { return ByteTiles::Spreads(rows); }

  // As even as possible, of pairs.
  static AS_ALWAYS_INLINE int64_t NextRows(int64_t left, int64_t lanes) {
    if (!Takes(lanes)) return ByteTiles::NextRows(left, lanes);
    const int64_t tiles = (left + kMmlaRows - 1) / kMmlaRows;
    const int64_t rows = (left + 2 * tiles - 1) / (2 * tiles) * 2;
    return rows < left ? rows : left;
  }

  template <Form kForm>
  static void Rows(int64_t rows, ByteBlock block, int64_t columns) {
    if (kForm != Form::kBytes || rows == 1 || !Takes(block.lanes)) {
      return ByteTileRows<kForm>(rows, block, columns);
    }
    MmlaRows<kMmlaRows>(rows, block, columns);
  }
};

}  // namespace
}  // namespace allspark::kernels
