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

// Rows [begin, + count) of a matrix, and their first `cols` columns.
Matrix Slice(const Matrix& x, int64_t begin, int64_t count, int64_t cols) {
  return {cpu::RowAt(x, begin), x.dtype, count, cols, x.ld};
}

// Numbers the blocks of rows of each range; returns the number of all blocks.
int64_t CountBlocks(std::span<LoraRows> rows) {
  int64_t blocks = 0;
  for (LoraRows& range : rows) {
    range.first_block = blocks;
    blocks += CeilDiv(range.num_rows, kBlockRows);
  }
  return blocks;
}

struct Block {
  const LoraWeight& weight;
  int64_t row_begin, num_rows;
};

Block BlockAt(std::span<const LoraRows> rows, int64_t block) {
  const auto after =
      std::upper_bound(rows.begin(), rows.end(), block,
                       [](int64_t b, const LoraRows& range) { return b < range.first_block; });
  const LoraRows& range = *(after - 1);
  const int64_t begin = (block - range.first_block) * kBlockRows;
  return {*range.weight, range.row_begin + begin, std::min(kBlockRows, range.num_rows - begin)};
}

// c (+)= x * w^T, on the calling thread.
void Multiply(const kernels::KernelTable& kernels, const ConstMatrix& x, const void* w,
              int64_t panel_columns, bool accumulate, const Matrix& c) {
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
  kernels.gemm[cpu::Slot(x.dtype)][cpu::Slot(x.dtype)](args);
}

// a * x of one block of rows.
void Shrink(const kernels::KernelTable& kernels, const ConstMatrix& x, const Block& block,
            const LoraScratch& scratch) {
  const LoraWeight& w = block.weight;
  ConstMatrix in = RowsOf(x, block.row_begin, block.row_begin + block.num_rows);
  if (x.dtype == DType::kInt8) {
    const Matrix wide = Slice(scratch.wide, block.row_begin, block.num_rows, x.cols);
    cpu::ConvertRows(kernels, in, wide);
    in = wide;
  }
  const Matrix sums = Slice(scratch.sums, block.row_begin, block.num_rows, w.rank);
  Multiply(kernels, in, w.a, kernels::kNarrowPanelColumns, /*accumulate=*/false, sums);
  if (w.dtype == DType::kFloat32) return;
  cpu::ConvertRows(kernels, sums, Slice(scratch.low, block.row_begin, block.num_rows, w.rank));
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
    const LoraWeight& w = block.weight;
    const Matrix low = Slice(scratch.low, block.row_begin, block.num_rows, w.rank);
    const int64_t bytes = w.rank * ElementBytes(w.dtype);
    for (int64_t i = 0; i < block.num_rows; ++i) {
      std::memcpy(cpu::RowAt(low, i),
                  static_cast<const unsigned char*>(w.a) + ids[block.row_begin + i] * bytes,
                  static_cast<size_t>(bytes));
    }
    Multiply(kernels_, low, w.parts[0].b, kernels::kPanelColumns, /*accumulate=*/true,
             Slice(y, block.row_begin, block.num_rows, y.cols));
  });
}

}  // namespace allspark
