#include "kernels/ref/quantized.h"

#include <cmath>
#include <cstdint>

#include "kernels/ref/scalars.h"

namespace allspark::kernels {
namespace {

// A packed quantised weight or table, [k, n].
template <int kBits>
struct PackedWeight {
  const unsigned char* w;
  const BFloat16* scale;
  const uint8_t* zero;
  int64_t k_total, group_size;

  // Index into the scales and zero points: [ceil(n/64)][groups][64].
  int64_t GroupAt(int64_t k, int64_t n) const {
    const int64_t groups = k_total / group_size;
    return (n / kPanelColumns * groups + k / group_size) * kPanelColumns + n % kPanelColumns;
  }
  int32_t Stored(int64_t k, int64_t n) const {
    constexpr int64_t kPerLane = 32 / kBits;
    const int64_t lane = n / kPanelColumns * (k_total / kPerLane) * kPanelColumns +
                         k / kPerLane * kPanelColumns + n % kPanelColumns;
    const int64_t at = k % kPerLane;
    if (kBits == 8) return w[lane * 4 + at];
    return at < 4 ? w[lane * 4 + at] & 15 : w[lane * 4 + at - 4] >> 4;
  }
  double Scale(int64_t k, int64_t n) const {
    return static_cast<double>(ToFloat(scale[GroupAt(k, n)]));
  }
  // The element before it is multiplied by its scale.
  int32_t Integer(int64_t k, int64_t n) const {
    return Stored(k, n) - (zero == nullptr ? SymmetricZero(kBits) : zero[GroupAt(k, n)]);
  }
};

template <int kBits, typename A>
void Gemm(const GemmArgs& args, Stream) noexcept {
  const PackedWeight<kBits> weight{static_cast<const unsigned char*>(args.w), args.scale, args.zero,
                                   args.k, args.group_size};
  const int64_t n_limit = args.panel_end * kPanelColumns;
  const int64_t n_end = n_limit < args.n ? n_limit : args.n;
  for (int64_t m = 0; m < args.m; ++m) {
    const A* a = static_cast<const A*>(args.a) + m * args.lda;
    for (int64_t n = args.panel_begin * kPanelColumns; n < n_end; ++n) {
      double sum = 0;
      const int64_t group = args.a_scale_group;
      const float* a_scale =
          args.a_scale + (args.a_scale == nullptr ? 0 : m * RowScales(args.k, group));
      for (int64_t k = 0; k < args.k; ++k) {
        const double scale = group == 0 ? 1.0 : Load(a_scale + k / group);
        sum += Load(a + k) * scale * weight.Integer(k, n) * weight.Scale(k, n);
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

template <int kBits>
void Embedding(const EmbeddingArgs& args, Stream) noexcept {
  const PackedWeight<kBits> table{static_cast<const unsigned char*>(args.table), args.scale,
                                  args.zero, args.cols, args.group_size};
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t i = 0; i < args.cols; ++i) {
      args.out[r * args.ldo + i] =
          static_cast<float>(table.Integer(i, args.ids[r]) * table.Scale(i, args.ids[r]));
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

void Quantize(const QuantizeArgs& args, Stream) noexcept {
  const int64_t num_scales = RowScales(args.cols, args.scale_group);
  const int64_t group = args.cols / num_scales;
  for (int64_t r = 0; r < args.rows; ++r) {
    int8_t* q = args.q + r * args.ldq;
    int32_t* sums = args.sums + r * RowSums(args.cols);
    for (int64_t i = 0; i < num_scales; ++i) {
      args.scale[r * num_scales + i] =
          QuantizeGroup(args.x + r * args.ldx + i * group, group, q + i * group);
    }
    for (int64_t i = 0; i < RowSums(args.cols); ++i) sums[i] = 0;
    for (int64_t i = 0; i < args.cols; ++i) {
      sums[i / kSumBlock] += q[i];
      sums[RowSums(args.cols) - 1] += q[i];
    }
  }
}

template <int kBits>
void FillBits(KernelTable& table, DType dtype) {
  const int i = static_cast<int>(dtype);
  table.gemm[i][static_cast<int>(DType::kInt8)] = Gemm<kBits, int8_t>;
  table.gemm[i][static_cast<int>(DType::kFloat32)] = Gemm<kBits, float>;
  table.gemm[i][static_cast<int>(DType::kBFloat16)] = Gemm<kBits, BFloat16>;
  table.embedding[i] = Embedding<kBits>;
}

}  // namespace

void FillQuantizedReference(KernelTable& table) noexcept {
  FillBits<8>(table, DType::kUInt8);
  FillBits<4>(table, DType::kUInt4);
  table.quantize = Quantize;
}

}  // namespace allspark::kernels
