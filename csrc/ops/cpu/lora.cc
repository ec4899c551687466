#include <algorithm>
#include <cstring>

#include "base/int_math.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {
namespace {

// Rows of one work item: enough that an adapter's matrices are read seldom, few enough that prompts
// keep every thread busy.
constexpr int64_t kBlockRows = 32;

// Numbers the blocks of rows of each range; returns the number of all blocks.
int64_t CountBlocks(std::span<LoraRows> rows) {
  int64_t blocks = 0;
  for (LoraRows& range : rows) {
    range.first_block = blocks;
    blocks += CeilDiv(range.num_rows, kBlockRows);
  }
  return blocks;
}

// Rows [begin, end) of the batch, which are some of a range's.
struct Block {
  const LoraRows& range;
  int64_t begin, end;

  const LoraWeight& weight() const { return *range.weight; }
  // The first `rank` columns of the block's sums, and the input of b.
  Matrix Sums(const LoraScratch& scratch) const {
    Matrix sums = RowsOf(scratch.sums, begin, end);
    sums.cols = weight().rank;
    return sums;
  }
  Matrix Low(const LoraScratch& scratch) const {
    return RowsOf(LowOf(scratch, range), begin - range.row_begin, end - range.row_begin);
  }
};

Block BlockAt(std::span<const LoraRows> rows, int64_t block) {
  const auto after =
      std::upper_bound(rows.begin(), rows.end(), block,
                       [](int64_t b, const LoraRows& range) { return b < range.first_block; });
  const LoraRows& range = *(after - 1);
  const int64_t begin = range.row_begin + (block - range.first_block) * kBlockRows;
  return {range, begin, std::min(begin + kBlockRows, range.row_begin + range.num_rows)};
}

// c (+)= x * w^T, on the calling thread. scale: of int8 x, whose single scales are left to the
// Linear.
void Multiply(const kernels::KernelTable& kernels, const ConstMatrix& x, const void* w,
              const uint16_t* scale, int64_t panel_columns, bool accumulate, const Matrix& c) {
  kernels::GemmArgs args{};
  args.a = x.data;
  args.lda = x.ld;
  args.w = w;
  args.c = static_cast<float*>(c.data);
  args.ldc = c.ld;
  args.m = x.rows;
  args.n = c.cols;
  args.k = x.cols;
  args.panel_end = CeilDiv(c.cols, panel_columns);
  args.accumulate = accumulate;
  args.panel_columns = panel_columns;
  DType stored = x.dtype;
  if (x.dtype == DType::kInt8) {
    stored = DType::kUInt8;
    args.scales.scale = scale;
    args.scales.group_size = x.cols;
    args.a_sums = x.row_sums;
    args.a_scale_group = x.scale_group;
    if (x.scale_group > 0) args.a_scale = x.row_scale;
  }
  kernels.gemm[cpu::Slot(stored)][cpu::Slot(x.dtype)](args);
}

// a * x of one block of rows.
void Shrink(const kernels::KernelTable& kernels, const ConstMatrix& x, const Block& block,
            const LoraScratch& scratch) {
  const LoraWeight& w = block.weight();
  const Matrix sums = block.Sums(scratch);
  Multiply(kernels, RowsOf(x, block.begin, block.end), w.a, w.a_scale, kernels::kNarrowPanelColumns,
           /*accumulate=*/false, sums);
  if (w.dtype == DType::kFloat32) return;
  const Matrix low = block.Low(scratch);
  if (w.dtype == DType::kInt8) {
    cpu::QuantizeRows(kernels, static_cast<const float*>(sums.data), sums.ld, low, 0, low.rows);
  } else {
    cpu::ConvertRows(kernels, sums, low);
  }
}

}  // namespace

void CpuOps::ShrinkLora(const ConstMatrix& x, std::span<LoraRows> rows,
                        const LoraScratch& scratch) {
  pool_.ParallelForItems(CountBlocks(rows), [&](int64_t item, int) {
    Shrink(kernels_, x, BlockAt(rows, item), scratch);
  });
}

void CpuOps::AddLoraEmbedding(const int32_t* ids, std::span<LoraRows> rows,
                              const LoraScratch& scratch, const Matrix& y) {
  pool_.ParallelForItems(CountBlocks(rows), [&](int64_t item, int) {
    const Block block = BlockAt(rows, item);
    const LoraWeight& w = block.weight();
    const Matrix low = block.Low(scratch);
    const int64_t bytes = w.rank * ElementBytes(w.dtype);
    for (int64_t i = 0; i < low.rows; ++i) {
      std::memcpy(cpu::RowAt(low, i),
                  static_cast<const unsigned char*>(w.a) + ids[block.begin + i] * bytes,
                  static_cast<size_t>(bytes));
    }
    Multiply(kernels_, low, w.parts[0].b, /*scale=*/nullptr, kernels::kPanelColumns,
             /*accumulate=*/true, RowsOf(y, block.begin, block.end));
  });
}

}  // namespace allspark
