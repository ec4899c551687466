#include <cmath>
#include <cstdint>

#include "kernels/ref/fill.h"
#include "kernels/ref/scalars.h"

namespace allspark::kernels {
namespace {

// A packed quantised weight or table, [k, n].
template <DType kStored>
struct PackedWeight {
  static constexpr int kBits = kStored == DType::kUInt4 ? 4 : 8;

  const unsigned char* w;
  const WeightScales& scales;
  int64_t k_total;
  int64_t width = kPanelColumns;  // columns of a panel

  // Index into the scales and what is laid out as they are: [ceil(n/width)][groups][width].
  int64_t GroupAt(int64_t k, int64_t n) const {
    const int64_t groups = k_total / scales.group_size;
    return (n / width * groups + k / scales.group_size) * width + n % width;
  }
  // Index of the lane that holds element k of column n, with per_lane elements to a lane.
  int64_t LaneAt(int64_t k, int64_t n, int64_t per_lane) const {
    return n / width * (k_total / per_lane) * width + k / per_lane * width + n % width;
  }
  int32_t Stored(int64_t k, int64_t n) const {
    constexpr int64_t kPerLane = 32 / kBits;
    const unsigned char* lane = w + LaneAt(k, n, kPerLane) * 4;
    const int64_t at = k % kPerLane;
    if (kBits == 8) return lane[at];
    const int32_t low = at < 4 ? lane[at] & 15 : lane[at - 4] >> 4;
    if (scales.high == nullptr) return low;
    return low + (scales.high[LaneAt(k, n, 16) * 4 + k % 4] >> (k % 16 / 4 * 2) & 3) * 16;
  }
  double Scale(int64_t k, int64_t n) const { return ScaleAt(scales, GroupAt(k, n)); }
  double Offset(int64_t k, int64_t n) const {
    return scales.offset == nullptr ? 0.0 : OffsetAt(scales, GroupAt(k, n));
  }
  // The element before it is multiplied by its scale.
  double Number(int64_t k, int64_t n) const {
    const int32_t u = Stored(k, n);
    if (kStored == DType::kFloat8E4M3) return static_cast<double>(ToFloat(Float8E4M3{Code(u)}));
    if (scales.table != nullptr) return scales.table[u];
    if (scales.offset != nullptr) return u;
    if (scales.zero != nullptr) return u - scales.zero[GroupAt(k, n)];
    return u - SymmetricZero(scales.high != nullptr ? 6 : kBits);
  }

 private:
  static uint8_t Code(int32_t u) { return static_cast<uint8_t>(u); }
};

template <DType kStored, typename A>
void Gemm(const GemmArgs& args) noexcept {
  const PackedWeight<kStored> weight{static_cast<const unsigned char*>(args.w), args.scales, args.k,
                                     args.panel_columns};
  const int64_t n_limit = args.panel_end * args.panel_columns;
  const int64_t n_end = n_limit < args.n ? n_limit : args.n;
  for (int64_t m = 0; m < args.m; ++m) {
    const A* a = static_cast<const A*>(args.a) + m * args.lda;
    for (int64_t n = args.panel_begin * args.panel_columns; n < n_end; ++n) {
      if (!InStrip(args, n)) continue;
      double sum = 0;
      const int64_t group = args.a_scale_group;
      const float* a_scale =
          args.a_scale + (args.a_scale == nullptr ? 0 : m * RowScales(args.k, group));
      for (int64_t k = 0; k < args.k; ++k) {
        const double scale = group == 0 ? 1.0 : Load(a_scale + k / group);
        sum +=
            Load(a + k) * scale * (weight.Number(k, n) * weight.Scale(k, n) + weight.Offset(k, n));
      }
      sum += LowRankSum(args, m, n);
      if (args.a_scale != nullptr && group == 0) sum *= Load(a_scale);
      if (args.bias != nullptr) sum += Load(args.bias + n);
      float* c = args.c + m * args.ldc + n;
      if (args.accumulate) sum += Load(c);
      *c = static_cast<float>(sum);
    }
  }
}

void AddLowRank(const LowRank& low, int64_t row, int64_t rows, int64_t panel,
                float* sums) noexcept {
  const int64_t groups = low.k / kSumBlock, first = (panel - low.panel_begin) * groups;
  WeightScales scales;
  scales.scale = low.b_scale + first * kPanelColumns;
  scales.group_size = kSumBlock;
  const PackedWeight<DType::kUInt8> b{
      static_cast<const unsigned char*>(low.b) + first * kSumBlock * kPanelColumns, scales, low.k};
  for (int64_t r = row; r < row + rows; ++r, sums += kPanelColumns) {
    const int8_t* a = static_cast<const int8_t*>(low.a) + r * low.lda;
    const float* a_scale = low.a_scale + r * low.ld_scales;
    for (int64_t n = 0; n < kPanelColumns; ++n) {
      double sum = Load(sums + n);
      for (int64_t k = 0; k < low.k; ++k) {
        sum += Load(a + k) * Load(a_scale + k / kSumBlock) * b.Number(k, n) * b.Scale(k, n);
      }
      Store(sums + n, sum);
    }
  }
}

template <DType kStored>
void Embedding(const EmbeddingArgs& args) noexcept {
  const PackedWeight<kStored> table{static_cast<const unsigned char*>(args.table), args.scales,
                                    args.cols};
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t i = 0; i < args.cols; ++i) {
      args.out[r * args.ldo + i] =
          static_cast<float>(table.Number(i, args.ids[r]) * table.Scale(i, args.ids[r]) +
                             table.Offset(i, args.ids[r]));
    }
  }
}

// In float32, as args.h requires: every table must give the same integers. Returns the scale.
float QuantizeGroup(const float* x, int64_t count, int8_t* q) {
  float highest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    finite &= std::isfinite(x[i]) != 0;
    highest = std::fmax(highest, std::fabs(x[i]));
  }
  if (!finite) highest = std::nanf("");
  const float inverse = finite && highest >= kQuantizeTiny ? 127.0f / highest : 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    q[i] = finite ? static_cast<int8_t>(std::nearbyintf(x[i] * inverse)) : 0;
  }
  return highest / 127.0f;
}

void Quantize(const QuantizeArgs& args) noexcept {
  const int64_t num_scales = RowScales(args.cols, args.scale_group);
  const int64_t group = args.cols / num_scales;
  for (int64_t r = 0; r < args.rows; ++r) {
    int8_t* q = args.q + r * args.ldq;
    for (int64_t i = 0; i < num_scales; ++i) {
      args.scale[r * num_scales + i] =
          QuantizeGroup(args.x + r * args.ldx + i * group, group, q + i * group);
    }
    SumBlocks(q, args.cols, args.sums + r * RowSums(args.cols));
  }
}

template <DType kStored>
void FillStored(KernelTable& table) {
  constexpr int kSlot = static_cast<int>(kStored);
  table.gemm[kSlot][static_cast<int>(DType::kFloat32)] = Gemm<kStored, float>;
  table.gemm[kSlot][static_cast<int>(DType::kBFloat16)] = Gemm<kStored, BFloat16>;
  if (kStored != DType::kFloat8E4M3) {
    table.gemm[kSlot][static_cast<int>(DType::kInt8)] = Gemm<kStored, int8_t>;
  }
  table.embedding[kSlot] = Embedding<kStored>;
}

}  // namespace

void FillQuantizedReference(KernelTable& table) noexcept {
  FillStored<DType::kUInt8>(table);
  FillStored<DType::kUInt4>(table);
  FillStored<DType::kFloat8E4M3>(table);
  table.low_rank[static_cast<int>(DType::kInt8)] = AddLowRank;
  table.quantize = Quantize;
}

}  // namespace allspark::kernels
