// GEMM of bfloat16 on AMX for more rows than a tile has. Sums stay in tiles over a whole block of
// K. Meanwhile the next block of the panel is fetched, and the rows before are finished: their
// bias, activation and stores take other units than the products.
#pragma once

#include "kernels/cpu/amx.inl"

namespace allspark::kernels {
namespace {

// `steps` steps of the products of 32 rows and 32 columns, or of 16 rows and 64 columns.
// work.Step() runs once a step. A is kept in the first-level cache, B passes by it: two tiles of
// each a step from the second level are more than it gives.
template <class Work>
static AS_ALWAYS_INLINE void AmxChain(bool two, AmxOperands x, Work& work) {
  // A tile store that comes long after the last one takes about 250 ns (Sapphire Rapids). So a tile
  // that nobody reads is stored every 16 steps, all of its rows to this line.
  alignas(64) unsigned char spare[kAmxLine];
  const int64_t c2 = two ? kAmxRows * x.c_stride : 2 * kAmxLine;
  if (x.resume) {
    _tile_loadd(0, x.c, x.c_stride);
    _tile_loadd(1, x.c + kAmxLine, x.c_stride);
    _tile_loadd(2, x.c + c2, x.c_stride);
    _tile_loadd(3, x.c + c2 + kAmxLine, x.c_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < x.steps; ++step) {
    AmxFetch(x.fetch);
    _tile_loadd(4, x.a, x.a_stride);
    _tile_stream_loadd(6, x.b, x.b_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, x.b + kAmxLine, x.b_stride);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_loadd(5, x.a + kAmxRows * x.a_stride, x.a_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_stream_loadd(6, x.b + 2 * kAmxLine, x.b_stride);
      _tile_dpbf16ps(2, 4, 6);
      _tile_stream_loadd(7, x.b + 3 * kAmxLine, x.b_stride);
      _tile_dpbf16ps(3, 4, 7);
    }
    if (step % 16 == 15) _tile_stored(4, spare, 0);
    x.a += kAmxLine;
    x.b += kAmxGroups * x.b_stride;
    work.Step();
  }
  _tile_stored(0, x.c, x.c_stride);
  _tile_stored(1, x.c + kAmxLine, x.c_stride);
  _tile_stored(2, x.c + c2, x.c_stride);
  _tile_stored(3, x.c + c2 + kAmxLine, x.c_stride);
  __asm__ volatile("" ::: "memory");  // as in AmxConfigure
}

// Finishes rows whose sums are complete, some with every step of other products.
template <class Store>
class AmxFinisher {
 public:
  AmxFinisher(const GemmArgs& args, const Store& store) : args_(args), store_(store) {}

  // `steps`: over how many.
  void Begin(const float* sums, int64_t row, int64_t rows, int64_t column, int64_t steps) {
    Rest();
    sums_ = begin_ = sums;
    row_ = row;
    left_ = rows;
    column_ = column;
    rows_per_step_ = CeilDiv(rows, steps);
  }
  AS_ALWAYS_INLINE void Step() {
    if (left_ > 0) Finish(Lower(left_, rows_per_step_));
  }
  AS_ALWAYS_INLINE void Rest() {
    if (left_ > 0) Finish(left_);
  }
  // Before other sums are written to `sums`.
  AS_ALWAYS_INLINE void Release(const float* sums) {
    if (begin_ == sums) Rest();
  }

 private:
  __attribute__((noinline)) void Finish(int64_t rows) {
    store_.Finish(args_, sums_, kAmxBlockRows * kPanelColumns, row_, rows, column_);
    sums_ += rows * kPanelColumns;
    row_ += rows;
    left_ -= rows;
  }

  const GemmArgs& args_;
  const Store& store_;
  const float *sums_ = nullptr, *begin_ = nullptr;
  int64_t row_ = 0, left_ = 0, column_ = 0, rows_per_step_ = 0;
};

// The products of a block of K, `groups` k groups, of up to 32 rows and a panel's columns, whose
// sums continue where x.resume. x: of whole steps; its fetch is of two passes.
template <class Work>
static AS_ALWAYS_INLINE void AmxPanelBlock(int64_t rows, AmxOperands x, int64_t groups,
                                           Work& work) {
  const bool two = rows > kAmxRows;
  for (int64_t left = groups; left > 0;) {
    const int64_t depth = Lower(left, kAmxGroups);  // the last step is shorter
    AmxConfigure(rows, depth);
    x.steps = left / depth;
    AmxChain(two, x, work);
    if (two) {
      AmxOperands right = x;
      right.b += 2 * kAmxLine;
      right.c += 2 * kAmxLine;
      right.fetch.at += x.steps * x.fetch.step;
      AmxChain(true, right, work);
    }
    x.a += x.steps * kAmxLine;
    x.b += x.steps * kAmxGroups * x.b_stride;
    x.fetch.step = 0;
    x.resume = true;
    left -= x.steps * depth;
  }
}

// bfloat16 activations and weights. Few rows, and narrow panels, are those of GemmPlain.
struct AmxGemm {
  template <class Store>
  static AS_ALWAYS_INLINE void Run(const GemmArgs& args, const Store& store) {
    if (args.m <= kAmxRows || args.panel_columns != kPanelColumns || args.k == 0) {
      return GemmPlain<uint16_t, DotAmx>::Run(args, store);
    }
    alignas(64) float sums[Store::kPanels * kAmxBlockRows * kPanelColumns];
    AmxFinisher<Store> finisher(args, store);
    for (int64_t p = args.panel_begin; p < args.panel_end; ++p) {
      for (int64_t row = 0; row < args.m; row += kAmxBlockRows) {
        const int64_t rows = Lower(args.m - row, kAmxBlockRows);
        Rows(args, store, p, row, rows, sums, finisher);
      }
    }
    finisher.Rest();
  }

  template <class Store>
  static AS_ALWAYS_INLINE void Rows(const GemmArgs& args, const Store& store, int64_t p,
                                    int64_t row_begin, int64_t rows, float* sums,
                                    AmxFinisher<Store>& finisher) {
    const int64_t groups = args.k / DotAmx::kGroup, apart = args.n / kPanelColumns / Store::kPanels;
    const int64_t pairs = CeilDiv(rows, kAmxPairRows);
    for (int64_t group = 0, next; group < groups; group = next) {
      next = Lower(groups, group + kGemmGroups);
      const bool last = next == groups;
      const int64_t passes = (next - group) / kAmxGroups * 2;  // of a pair of tiles' rows
      const int64_t lines = (next - group) * kPanelStride / kAmxLine;
      // With more rows than a block, they pass over the same panel again.
      const bool fetches = passes > 0 && (!last || row_begin + rows == args.m);
      const int64_t step = fetches ? CeilDiv(lines, pairs * passes) : 0;
      for (int64_t r = 0; r < rows; r += kAmxPairRows) {
        const int64_t count = Lower(rows - r, kAmxPairRows);
        const int64_t row = row_begin + r, column = p * kPanelColumns;
        if (group == 0) {
          store.At(args, row, column).FetchRows(0, count);
          finisher.Release(sums + r * kPanelColumns);
        }
        for (int64_t i = 0; i < Store::kPanels; ++i) {
          const unsigned char* panel =
              static_cast<const unsigned char*>(args.w) + (p + i * apart) * groups * kPanelStride;
          AmxOperands x;
          x.a_stride = args.lda * 2;
          x.a = static_cast<const unsigned char*>(args.a) + row * x.a_stride + group * kLaneBytes;
          x.b_stride = kPanelStride;
          x.b = panel + group * kPanelStride;
          x.c_stride = kPanelStride;
          x.c = reinterpret_cast<unsigned char*>(sums + (i * kAmxBlockRows + r) * kPanelColumns);
          x.resume = group > 0;
          x.fetch = {panel + next * kPanelStride + r / kAmxPairRows * passes * step * kAmxLine,
                     step * kAmxLine};
          AmxPanelBlock(count, x, next - group, finisher);
          if (last && args.num_low_rank > 0) {
            AddLowRanks(args, p + i * apart, row, count, reinterpret_cast<float*>(x.c));
          }
        }
        if (last) {
          finisher.Begin(sums + r * kPanelColumns, row, count, column,
                         Store::kPanels * Higher(passes, 1));
        }
      }
    }
  }
};

}  // namespace
}  // namespace allspark::kernels
