#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {
namespace {

auto KernelFor(const kernels::KernelTable& table, const NormWeight& norm, DType dtype) {
  return (norm.centered ? table.layer_norm : table.rms_norm)[cpu::Slot(dtype)];
}

kernels::NormArgs ArgsFor(const ConstMatrix& x, const NormWeight& norm, const Matrix& y) {
  kernels::NormArgs args{};
  args.x = static_cast<const float*>(x.data);
  args.ldx = x.ld;
  args.weight = norm.weight;
  args.y = y.data;
  args.ldy = y.ld;
  args.rows = x.rows;
  args.cols = x.cols;
  args.eps = norm.eps;
  args.bias = norm.bias;
  return args;
}

}  // namespace

void CpuOps::Norm(const ConstMatrix& x, const int64_t* row_ids, const NormWeight& norm,
                  const RowScratch& scratch, const Matrix& y) {
  const bool quantize = y.dtype == DType::kInt8;
  const auto kernel = KernelFor(kernels_, norm, quantize ? DType::kFloat32 : y.dtype);
  pool_.ParallelFor(y.rows, cpu::RowGrain(x.cols), [&](int64_t begin, int64_t end, int thread_id) {
    kernels::NormArgs args = ArgsFor(x, norm, y);
    if (row_ids == nullptr && !quantize) {
      args.x = static_cast<const float*>(cpu::RowAt(x, begin));
      args.y = cpu::RowAt(y, begin);
      args.rows = end - begin;
      return kernel(args);
    }
    args.rows = 1;
    for (int64_t i = begin; i < end; ++i) {
      args.x = static_cast<const float*>(cpu::RowAt(x, row_ids == nullptr ? i : row_ids[i]));
      float* const row = quantize ? cpu::RowOf(scratch, thread_id) : nullptr;
      args.y = quantize ? row : cpu::RowAt(y, i);
      kernel(args);
      if (quantize) cpu::QuantizeRows(kernels_, row, y.cols, y, i, i + 1);
    }
  });
}

void CpuOps::NormHeads(const Matrix& x, int64_t head_begin, int64_t num_heads, int64_t head_dim,
                       const NormWeight& norm) {
  const auto kernel = KernelFor(kernels_, norm, x.dtype);
  pool_.ParallelFor(
      x.rows, cpu::RowGrain(num_heads * head_dim), [&](int64_t begin, int64_t end, int) {
        kernels::NormArgs args = ArgsFor(x, norm, x);
        args.ldx = args.ldy = args.cols = head_dim;
        args.rows = num_heads;
        for (int64_t row = begin; row < end; ++row) {
          float* heads = static_cast<float*>(cpu::RowAt(x, row)) + head_begin * head_dim;
          args.x = heads;
          args.y = heads;
          kernel(args);
        }
      });
}

}  // namespace allspark
