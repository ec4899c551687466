// The oracle: every operation in plain C++, computed in double and rounded once at the end. Also
// the fallback on processors without kernels of their own. Written for clarity, not for speed.
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/kernel_slots.h"
#include "kernels/ref/fill.h"
#include "kernels/ref/scalars.h"

namespace allspark::kernels {
namespace {

template <typename T>
constexpr int64_t kGroup = 4 / static_cast<int64_t>(sizeof(T));

// Element (k, n) of a weight with k_total rows, packed in panels of panel_columns columns.
template <typename T>
const T* PackedAt(const T* w, int64_t k_total, int64_t k, int64_t n,
                  int64_t panel_columns = kPanelColumns) {
  const int64_t group = kGroup<T>;
  const int64_t panel = n / panel_columns;
  const int64_t column = n % panel_columns;
  return w + panel * panel_columns * k_total + (k / group) * panel_columns * group +
         column * group + k % group;
}

template <typename A, typename W>
void Gemm(const GemmArgs& args) noexcept {
  const A* a = static_cast<const A*>(args.a);
  const W* w = static_cast<const W*>(args.w);
  const int64_t n_begin = args.panel_begin * args.panel_columns;
  const int64_t n_limit = args.panel_end * args.panel_columns;
  const int64_t n_end = n_limit < args.n ? n_limit : args.n;
  for (int64_t m = 0; m < args.m; ++m) {
    for (int64_t n = n_begin; n < n_end; ++n) {
      if (!InStrip(args, n)) continue;
      double sum = 0;
      for (int64_t k = 0; k < args.k; ++k) {
        sum += Load(a + m * args.lda + k) * Load(PackedAt(w, args.k, k, n, args.panel_columns));
      }
      sum += LowRankSum(args, m, n);
      if (args.a_scale != nullptr) sum *= Load(args.a_scale + m);
      if (args.bias != nullptr) sum += Load(args.bias + n);
      float* c = args.c + m * args.ldc + n;
      if (args.accumulate) sum += Load(c);
      Store(c, sum);
    }
  }
}

template <typename T>
void AddLowRank(const LowRank& low, int64_t row, int64_t rows, int64_t panel,
                float* sums) noexcept {
  const T* b = static_cast<const T*>(low.b) + (panel - low.panel_begin) * low.k * kPanelColumns;
  for (int64_t r = 0; r < rows; ++r) {
    const T* a = static_cast<const T*>(low.a) + (row + r) * low.lda;
    for (int64_t n = 0; n < kPanelColumns; ++n) {
      float* out = sums + r * kPanelColumns + n;
      double sum = Load(out);
      for (int64_t k = 0; k < low.k; ++k) sum += Load(a + k) * Load(PackedAt(b, low.k, k, n));
      Store(out, sum);
    }
  }
}

template <typename To>
void Convert(const ConvertArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* x = static_cast<const float*>(args.x) + r * args.ldx;
    To* y = static_cast<To*>(args.y) + r * args.ldy;
    for (int64_t i = 0; i < args.cols; ++i) Store(y + i, Load(x + i));
  }
}

void Scale(const ScaleArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t i = 0; i < args.cols; ++i) {
      float* y = args.y + r * args.ldy + i;
      double value = Load(args.x + r * args.ldx + i) * Load(&args.scale);
      const double cap = Load(&args.soft_cap);
      if (cap > 0) value = cap * std::tanh(value / cap);
      const double limit = Load(&args.limit);
      if (limit > 0 && value > limit) value = limit;
      if (limit > 0 && value < -limit) value = -limit;
      Store(y, args.accumulate ? Load(y) + value : value);
    }
  }
}

template <typename T>
void RmsNorm(const NormArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* x = args.x + r * args.ldx;
    T* y = static_cast<T*>(args.y) + r * args.ldy;
    double squares = 0;
    for (int64_t i = 0; i < args.cols; ++i) squares += Load(x + i) * Load(x + i);
    const double mean = squares / static_cast<double>(args.cols);
    const double scale = 1.0 / std::sqrt(mean + static_cast<double>(args.eps));
    for (int64_t i = 0; i < args.cols; ++i)
      Store(y + i, Load(x + i) * scale * Load(args.weight + i));
  }
}

template <typename T>
void LayerNorm(const NormArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* x = args.x + r * args.ldx;
    T* y = static_cast<T*>(args.y) + r * args.ldy;
    const double count = static_cast<double>(args.cols);
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < args.cols; ++i) mean += Load(x + i) / count;
    for (int64_t i = 0; i < args.cols; ++i) squares += (Load(x + i) - mean) * (Load(x + i) - mean);
    const double scale = 1.0 / std::sqrt(squares / count + static_cast<double>(args.eps));
    for (int64_t i = 0; i < args.cols; ++i) {
      const double bias = args.bias == nullptr ? 0 : Load(args.bias + i);
      Store(y + i, (Load(x + i) - mean) * scale * Load(args.weight + i) + bias);
    }
  }
}

double Activate(Activation act, double x) {
  switch (act) {
    case Activation::kSilu:
      return x / (1.0 + std::exp(-x));
    case Activation::kGeluTanh:
      // 0.5 (1 + tanh(u)) is 1 / (1 + e^-2u), which does not cancel.
      return x / (1.0 + std::exp(-2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)));
    case Activation::kGeluErf:
      return 0.5 * x * std::erfc(-x * 0.7071067811865476);
    case Activation::kRelu:
      return x < 0 ? 0.0 : x;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

template <typename T>
void GatedAct(const GatedActArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* x = args.x + r * args.ldx;
    T* out = static_cast<T*>(args.out) + r * args.ldo;
    for (int64_t i = 0; i < args.cols; ++i) {
      const double up = args.gated ? Load(x + args.cols + i) : 1.0;
      Store(out + i, Activate(args.act, Load(x + i)) * up);
    }
  }
}

template <typename T>
void Embedding(const EmbeddingArgs& args) noexcept {
  const T* table = static_cast<const T*>(args.table);
  for (int64_t r = 0; r < args.rows; ++r) {
    const int64_t id = args.ids[r];
    for (int64_t i = 0; i < args.cols; ++i) {
      const T* p = args.packed ? PackedAt(table, args.cols, i, id) : table + id * args.cols + i;
      float* out = args.out + r * args.ldo + i;
      Store(out, args.accumulate ? Load(out) + Load(p) : Load(p));
    }
  }
}

void Rope(const RopeArgs& args) noexcept {
  const int64_t half = args.rotary_dim / 2;
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* cos_sin = args.cos_sin + static_cast<int64_t>(args.positions[r]) * args.rotary_dim;
    for (int64_t h = 0; h < args.heads; ++h) {
      float* x = args.x + r * args.ldx + h * args.head_dim;
      for (int64_t i = 0; i < half; ++i) {
        float* first = args.interleaved ? x + 2 * i : x + i;
        float* second = args.interleaved ? x + 2 * i + 1 : x + half + i;
        const double c = Load(cos_sin + 2 * i), s = Load(cos_sin + 2 * i + 1);
        const double u = Load(first), v = Load(second);
        Store(first, u * c - v * s);
        Store(second, v * c + u * s);
      }
    }
  }
}

void Hadamard(const HadamardArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t begin = 0; begin < args.cols; begin += args.size) {
      double x[kMostHadamard];
      for (int64_t i = 0; i < args.size; ++i) x[i] = Load(args.x + r * args.ldx + begin + i);
      for (int64_t i = 0; i < args.size; ++i) {
        double sum = 0;
        for (int64_t j = 0; j < args.size; ++j) {
          sum += std::popcount(static_cast<uint64_t>(i & j)) % 2 == 0 ? x[j] : -x[j];
        }
        Store(args.y + r * args.ldy + begin + i, sum / std::sqrt(static_cast<double>(args.size)));
      }
    }
  }
}

void ArgMax(const ArgMaxArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* x = args.x + r * args.ldx;
    int64_t best = -1;
    for (int64_t i = 0; i < args.cols; ++i) {
      if (std::isnan(x[i])) continue;
      if (best < 0 || x[i] > x[best]) best = i;
    }
    args.index[r] = static_cast<int32_t>(best < 0 ? 0 : best);
  }
}

void SumExp(const SumExpArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* x = args.x + r * args.ldx;
    float highest = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < args.cols; ++i) highest = x[i] > highest ? x[i] : highest;
    double sum = 0;
    for (int64_t i = 0; i < args.cols; ++i) {
      if (std::isnan(x[i])) continue;
      // Equal infinities count as a difference of 0; their subtraction would give NaN.
      sum += x[i] == highest ? 1.0 : std::exp(double{x[i]} - double{highest});
    }
    args.highest[r] = highest;
    args.sum[r] = sum;
  }
}

// The only kernel for this: processors without wide gathers can do no better than single loads.
template <typename T>
void GatherColumns(const GatherColumnsArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    const T* x = static_cast<const T*>(args.x) + r * args.ldx;
    T* y = static_cast<T*>(args.y) + r * args.ldy;
    for (int64_t j = 0; j < args.cols; ++j) y[j] = x[args.order[j]];
  }
}

void GatherInt8Columns(const GatherColumnsArgs& args) noexcept {
  GatherColumns<int8_t>(args);
  for (int64_t r = 0; r < args.rows; ++r) {
    const int8_t* y = static_cast<const int8_t*>(args.y) + r * args.ldy;
    SumBlocks(y, args.cols, args.sums + r * RowSums(args.cols));
  }
}

template <typename T>
void FillType(KernelTable& table, DType dtype) {
  const int i = static_cast<int>(dtype);
  table.gemm[i][i] = Gemm<T, T>;
  table.low_rank[i] = AddLowRank<T>;
  table.rms_norm[i] = RmsNorm<T>;
  table.layer_norm[i] = LayerNorm<T>;
  table.gated_act[i] = GatedAct<T>;
  table.embedding[i] = Embedding<T>;
  table.gather_columns[i] = GatherColumns<T>;
}

}  // namespace

void FillReference(KernelTable& table) noexcept {
  FillType<float>(table, DType::kFloat32);
  FillType<BFloat16>(table, DType::kBFloat16);
  const int half = static_cast<int>(DType::kFloat16);
  table.gemm[half][static_cast<int>(DType::kFloat32)] = Gemm<float, Float16>;
  table.embedding[half] = Embedding<Float16>;
  FillAttentionReference(table);
  FillQuantizedReference(table);
  FillMoeReference(table);
  table.convert[static_cast<int>(DType::kFloat32)][static_cast<int>(DType::kBFloat16)] =
      Convert<BFloat16>;
  table.gather_columns[static_cast<int>(DType::kInt8)] = GatherInt8Columns;
  table.scale = Scale;
  table.rope = Rope;
  table.hadamard = Hadamard;
  table.argmax = ArgMax;
  table.sum_exp = SumExp;
}

}  // namespace allspark::kernels
