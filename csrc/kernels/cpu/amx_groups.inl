// Groups of K whose sums are scaled, on AMX: the sums of a group leave the tiles, and are scaled
// and added in vectors while the tiles multiply the next groups.
#pragma once

#include "kernels/cpu/amx.inl"

namespace allspark::kernels {
namespace {

constexpr int64_t kAmxHalf = 2 * kAmxColumns;  // columns of a pass over the rows
// Groups that are added together, and their sums of 32 rows and 32 columns. Two such runs, one that
// is computed and one that is added, are 16 KiB.
constexpr int64_t kAmxRun = 2;
constexpr int64_t kAmxSums = kAmxPairRows * kAmxHalf;

// A panel's weights as tiles are loaded from them: where the first begins, and bytes from one row
// of a tile, from the first tile of a step, from a step and from the first half of the columns to
// the next.
struct AmxWeights {
  const unsigned char* at;
  int64_t stride, apart, step, half;
};

// Whole groups, each of whole steps, of rows and a panel's columns.
struct AmxGroupBlock {
  const unsigned char* a;  // of the first row
  int64_t a_stride;        // bytes
  AmxWeights b;
  int64_t rows, groups;
  int64_t steps;  // of a group
  // As in ByteBlock.
  int64_t index;
  PanelScales scale;
  int w_shift;
  const float* a_scale;
  int64_t ld_scales;
  int a_shift;
  float* c;
  bool fresh;
  Fetch fetch;
  Destination destination;
};

// Adds the scaled sums of a run of groups to c, a few rows with every step of other products. The
// arithmetic is that of AddGroup, or, of float sums, of GemmWidenedRows. Sum: float or int32_t.
template <class Sum, bool kRowScales, bool kColumnScales>
class AmxFolder {
 public:
  // Of 32 columns from `column` on and `rows` rows. a_scale: where the block has them, of the first
  // of these. `steps`: over how many steps.
  AS_ALWAYS_INLINE void Begin(const AmxGroupBlock& block, const float* a_scale, int64_t column,
                              float* c, int64_t group, int64_t run, int64_t rows, const Sum* sums,
                              int64_t steps) {
    Rest();
    left_ = rows;
    run_ = run;
    rows_per_step_ = CeilDiv(rows, steps);
    sums_ = sums;
    c_ = c;
    fresh_ = block.fresh && group == 0;
    ld_scales_ = block.ld_scales;
    for (int64_t g = 0; g < run; ++g) {
      const int64_t index = block.index + group + g;
      if constexpr (kRowScales) a_scale_[g] = a_scale + (index >> block.a_shift);
      if constexpr (kColumnScales) {
        VecF scale[2];
        LoadScales<2>(block.scale, index >> block.w_shift, column, scale);
        StoreF(scale_[g], scale[0]);
        StoreF(scale_[g] + kLanes, scale[1]);
      }
    }
  }
  AS_ALWAYS_INLINE void Step() {
    if (left_ > 0) Add(Lower(left_, rows_per_step_));
  }
  AS_ALWAYS_INLINE void Rest() {
    if (left_ > 0) Add(left_);
  }

 private:
  AS_ALWAYS_INLINE void Add(int64_t rows) {
    left_ -= rows;
    if (run_ == kAmxRun) {
      AddRows<kAmxRun>(rows);
    } else {
      AddRows<1>(rows);
    }
  }

  static AS_ALWAYS_INLINE VecF LoadSums(const int32_t* sums) { return IntToFloat(LoadI(sums)); }
  static AS_ALWAYS_INLINE VecF LoadSums(const float* sums) { return LoadF(sums); }

  template <int kGroups>
  __attribute__((noinline)) void AddRows(int64_t rows) {
    const Sum* sums = sums_;
    float* c = c_;
    const bool fresh = fresh_;
    const int64_t ld_scales = ld_scales_;
    const float* a_scale[kGroups];
    VecF scale[kGroups][2];
    AS_UNROLL for (int g = 0; g < kGroups; ++g) {
      a_scale[g] = a_scale_[g];
      AS_UNROLL for (int v = 0; v < 2; ++v) scale[g][v] = LoadF(scale_[g] + v * kLanes);
    }
    for (int64_t r = 0; r < rows; ++r) {
      VecF sum[2];
      AS_UNROLL for (int v = 0; v < 2; ++v) sum[v] = fresh ? Zero() : LoadF(c + v * kLanes);
      AS_UNROLL for (int g = 0; g < kGroups; ++g) {
        const VecF row = kRowScales ? Set1(*a_scale[g]) : Zero();
        AS_UNROLL for (int v = 0; v < 2; ++v) {
          const VecF x = LoadSums(sums + g * kAmxSums + v * kLanes);
          sum[v] = !kRowScales      ? Fma(x, scale[g][v], sum[v])
                   : !kColumnScales ? Fma(x, row, sum[v])
                                    : Fma(Mul(x, row), scale[g][v], sum[v]);
        }
        if constexpr (kRowScales) a_scale[g] += ld_scales;
      }
      AS_UNROLL for (int v = 0; v < 2; ++v) StoreF(c + v * kLanes, sum[v]);
      sums += kAmxHalf;
      c += kPanelColumns;
    }
    sums_ = sums;
    c_ = c;
    AS_UNROLL for (int g = 0; g < kGroups; ++g) a_scale_[g] = a_scale[g];
  }

  int64_t left_ = 0, run_ = 0, rows_per_step_ = 0, ld_scales_ = 0;
  const Sum* sums_ = nullptr;
  float* c_ = nullptr;
  bool fresh_ = false;
  const float* a_scale_[kAmxRun] = {};
  alignas(64) float scale_[kAmxRun][kAmxHalf] = {};
};

// int32_t: signed bytes times signed bytes; float: bfloat16.
template <class Sum>
constexpr bool kSumsFloats = false;
template <>
constexpr bool kSumsFloats<float> = true;
#define AS_AMX_DOT(c, a, b)         \
  if constexpr (kSumsFloats<Sum>) { \
    _tile_dpbf16ps(c, a, b);        \
  } else {                          \
    _tile_dpbssd(c, a, b);          \
  }

// A group's sums of up to 32 rows and 32 columns, from `a` and `b` on, which then point behind
// them.
template <class Sum, class Work>
static AS_ALWAYS_INLINE void AmxGroupSums(bool two, const AmxGroupBlock& block,
                                          const unsigned char*& a, const unsigned char*& b,
                                          Fetch& fetch, Sum* sums, Work& work) {
  constexpr int64_t kStride = kAmxHalf * kLaneBytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < block.steps; ++step) {
    AmxFetch(fetch);
    _tile_loadd(4, a, block.a_stride);
    _tile_stream_loadd(6, b, block.b.stride);
    AS_AMX_DOT(0, 4, 6)
    _tile_stream_loadd(7, b + block.b.apart, block.b.stride);
    AS_AMX_DOT(1, 4, 7)
    if (two) {
      _tile_loadd(5, a + kAmxRows * block.a_stride, block.a_stride);
      AS_AMX_DOT(2, 5, 6)
      AS_AMX_DOT(3, 5, 7)
    }
    a += kAmxLine;
    b += block.b.step;
    work.Step();
  }
  auto* const c = reinterpret_cast<unsigned char*>(sums);
  _tile_stored(0, c, kStride);
  _tile_stored(1, c + kAmxLine, kStride);
  if (two) {
    _tile_stored(2, c + kAmxRows * kStride, kStride);
    _tile_stored(3, c + kAmxRows * kStride + kAmxLine, kStride);
  }
}
#undef AS_AMX_DOT

// Requires an AmxSession.
template <class Sum, bool kRowScales, bool kColumnScales>
void AmxGroups(const AmxGroupBlock& block) {
  alignas(64) Sum sums[2][kAmxRun * kAmxSums];
  AmxFolder<Sum, kRowScales, kColumnScales> folder;
  Fetch fetch = block.fetch;
  int64_t turn = 0;
  for (int64_t row = 0; row < block.rows; row += kAmxPairRows) {
    const int64_t count = Lower(block.rows - row, kAmxPairRows);
    block.destination.FetchRows(row, count);
    AmxConfigure(count, kAmxGroups);
    const float* const a_scale = kRowScales ? block.a_scale + row * block.ld_scales : nullptr;
    for (int64_t i = 0; i < 2; ++i) {
      const unsigned char* a = block.a + row * block.a_stride;
      const unsigned char* b = block.b.at + i * block.b.half;
      float* const c = block.c + row * kPanelColumns + i * kAmxHalf;
      for (int64_t group = 0; group < block.groups; group += kAmxRun, ++turn) {
        const int64_t run = Lower(block.groups - group, kAmxRun);
        Sum* const begin = sums[turn % 2];
        for (int64_t g = 0; g < run; ++g) {
          AmxGroupSums<Sum>(count > kAmxRows, block, a, b, fetch, begin + g * kAmxSums, folder);
        }
        __asm__ volatile("" ::: "memory");  // as in AmxConfigure
        folder.Begin(block, a_scale, i * kAmxHalf, c, group, run, count, begin,
                     kAmxRun * block.steps);
      }
    }
  }
  folder.Rest();
}

// What each step of a block fetches, so that it has asked for `bytes` from `next` on at its end.
static AS_ALWAYS_INLINE Fetch AmxFetchShare(const unsigned char* next, int64_t bytes, int64_t rows,
                                            int64_t steps) {
  const int64_t all = CeilDiv(rows, kAmxPairRows) * 2 * steps;
  return {next, CeilDiv(bytes / kAmxLine, all) * kAmxLine};
}

// `count` k of a panel as signed bytes, less their zero points, in the order in which tiles are
// loaded: [2 halves][count / 64][2 tiles][16 lanes of four k][16 columns].
template <Form kForm>
void MakeSignedTiles(const ByteBlock& block, int64_t count, unsigned char* out) {
  const VecI numbers = kForm == Form::kTable ? LoadTable(block.table) : Set1Int(0);
  const int64_t half = count * kAmxHalf, group = block.lanes * 4;
  const unsigned char *b = block.b, *high = block.high;
  VecI zero[4];
  const auto put = [&](int64_t lane, int v, VecI unit) __attribute__((always_inline)) {
    unsigned char* to = out + v / 2 * half + (lane / kAmxGroups * 2 + v % 2) * kAmxTileBytes +
                        lane % kAmxGroups * kAmxLine;
    StoreI(to, _mm512_sub_epi8(unit, zero[v]));
  };
  for (int64_t k = 0; k < count; k += StepK(kForm)) {
    if (k % group == 0) {
      AS_UNROLL for (int v = 0; v < 4; ++v) {
        const VecI point = block.zero == nullptr
                               ? Set1Int(block.symmetric_zero)
                               : LoadBytes(ZerosAt(block, k / group) + v * kLanes);
        zero[v] = MulInt(point, Set1Int(0x01010101));
      }
    }
    AS_UNROLL for (int v = 0; v < 4; ++v) {
      const unsigned char* low = b + v * kVecBytes;
      const unsigned char* top = kForm == Form::kSixBits ? high + v * kVecBytes : nullptr;
      put(k / 4, v, Unit<kForm, 0>(low, top, numbers));
      if constexpr (StepK(kForm) > 4) put(k / 4 + 1, v, Unit<kForm, 1>(low, top, numbers));
      if constexpr (StepK(kForm) > 8) {
        put(k / 4 + 2, v, Unit<kForm, 2>(low, top, numbers));
        put(k / 4 + 3, v, Unit<kForm, 3>(low, top, numbers));
      }
    }
    b += StepBytes(kForm);
    if constexpr (kForm == Form::kSixBits) high += kPanelStride;
  }
}

// Tiles for GemmBytes: blocks of many rows and whole groups by AmxGroups, others by AmxByteTiles.
struct AmxGroupTiles : AmxByteTiles {
  static constexpr int64_t kRows = kAmxBlockRows;
  static constexpr bool kHasBlocks = true;

  // False if it leaves the block to Rows. tiles: of the block as bytes.
  template <Form kForm>
  static AS_ALWAYS_INLINE bool Block(const ByteBlock& block, int64_t rows, unsigned char* tiles,
                                     const unsigned char* next, int64_t bytes,
                                     const Destination& destination) {
    if (rows <= kAmxRows || !block.first || !block.last || block.lanes % kAmxGroups != 0) {
      return false;
    }
    // Bytes less any other zero point do not fit signed bytes.
    if (kForm == Form::kBytes && (block.zero != nullptr || block.symmetric_zero != 128)) {
      return false;
    }
    const int64_t count = block.groups * block.lanes * 4;
    MakeSignedTiles<kForm>(block, count, tiles);
    AmxGroupBlock groups;
    groups.a = reinterpret_cast<const unsigned char*>(block.a);
    groups.a_stride = block.lda;
    groups.b = {tiles, kAmxLine, kAmxTileBytes, 2 * kAmxTileBytes, count * kAmxHalf};
    groups.rows = rows;
    groups.groups = block.groups;
    groups.steps = block.lanes / kAmxGroups;
    groups.index = block.index;
    groups.scale = block.scale;
    groups.w_shift = block.w_shift;
    groups.a_scale = block.a_scale;
    groups.ld_scales = block.ld_scales;
    groups.a_shift = block.a_shift;
    groups.c = block.c;
    groups.fresh = block.fresh;
    groups.fetch = AmxFetchShare(next, bytes, rows, block.groups * groups.steps);
    groups.destination = destination;
    if (block.a_scale == nullptr) {
      AmxGroups<int32_t, false, true>(groups);
    } else if (block.scale.at == nullptr) {
      AmxGroups<int32_t, true, false>(groups);
    } else {
      AmxGroups<int32_t, true, true>(groups);
    }
    return true;
  }
};

}  // namespace
}  // namespace allspark::kernels
