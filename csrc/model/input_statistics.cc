#include "model/input_statistics.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/int_math.h"
#include "ops/linear.h"
#include "tensor/tensor_view.h"

namespace allspark {
namespace {

constexpr int64_t kPanel = kernels::kPanelColumns;
// Rows of x whose products are summed at once, before they are added to those before. Every sum is
// over whole steps from the first row of a pass on, so threads and panels do not change its order.
constexpr int64_t kRows = 512;

template <typename T>
const T* RowOf(const ConstMatrix& x, int64_t row) {
  return static_cast<const T*>(x.data) + row * x.ld;
}

float ToFloat(float x) { return x; }

// Reserves `count` elements, unless there are as many already.
template <typename T>
T* Reserve(Allocator* allocator, int64_t count, Buffer& buffer) {
  const auto bytes = static_cast<size_t>(count) * sizeof(T);
  if (buffer.bytes() < bytes) {
    buffer = Buffer();
    Result<Buffer> made = Buffer::Create(allocator, bytes);
    AS_CHECK(made.ok()) << made.status().ToString();
    buffer = std::move(*made);
  }
  return static_cast<T*>(buffer.data());
}

void Mirror(int64_t n, std::vector<float>& products) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = i + 1; j < n; ++j) products[j * n + i] = products[i * n + j];
  }
}

}  // namespace

void InputCollector::Add(const std::string& tensor, const void* data, int64_t count, int64_t stride,
                         int64_t features, bool products) {
  for (int64_t part = 0; part < count; ++part) {
    Weight weight{tensor, part, count, products, {}};
    weight.statistics.num_features = features;
    weights_.emplace(static_cast<const unsigned char*>(data) + part * stride, std::move(weight));
  }
}

void InputCollector::See(const LinearWeight& weight, const ConstMatrix& x) {
  const auto found = weights_.find(weight.data);
  if (found == weights_.end()) return;
  Weight& seen = found->second;
  InputStatistics& statistics = seen.statistics;
  const int64_t features = statistics.num_features;
  const bool is_float32 = x.dtype == DType::kFloat32;
  AS_CHECK((is_float32 || x.dtype == DType::kBFloat16) && x.cols == features)
      << "input statistics: '" << seen.tensor << "' reads " << x.cols << " features of type "
      << DTypeName(x.dtype) << "; expected " << features << " of float32 or bfloat16";
  if (statistics.num_tokens == 0) {
    statistics.sum_abs.assign(static_cast<size_t>(features), 0);
    statistics.max_abs.assign(static_cast<size_t>(features), 0);
    if (seen.products) {
      statistics.products.assign(static_cast<size_t>(features * features), 0);
    }
  }
  if (is_float32) {
    AddRows<float>(x, seen);
  } else {
    AddRows<BFloat16>(x, seen);
  }
  statistics.num_tokens += x.rows;
}

template <typename T>
void InputCollector::AddRows(const ConstMatrix& x, Weight& weight) {
  AddMagnitudes<T>(x, weight);
  if (weight.products) AddProducts<T>(x, weight);
}

template <typename T>
void InputCollector::AddMagnitudes(const ConstMatrix& x, Weight& weight) {
  InputStatistics& statistics = weight.statistics;
  device_.host_pool().ParallelFor(x.cols, kPanel, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = 0; row < x.rows; ++row) {
      const T* values = RowOf<T>(x, row);
      for (int64_t i = begin; i < end; ++i) {
        const float magnitude = std::fabs(ToFloat(values[i]));
        statistics.sum_abs[static_cast<size_t>(i)] += magnitude;
        float& largest = statistics.max_abs[static_cast<size_t>(i)];
        largest = largest < magnitude ? magnitude : largest;
      }
    }
  });
  if (not_finite_.has_value()) return;
  const auto finite = [](double sum) { return std::isfinite(sum); };
  if (std::all_of(statistics.sum_abs.begin(), statistics.sum_abs.end(), finite)) return;
  for (int64_t row = 0; row < x.rows; ++row) {
    const T* values = RowOf<T>(x, row);
    if (std::all_of(values, values + x.cols, [&](T value) { return finite(ToFloat(value)); })) {
      continue;
    }
    not_finite_ = NotFinite{weight.tensor, weight.part, weight.count, row};
    return;
  }
}

// The products are those of a GEMM: x^T, row-major, times x, whose panels are those of a weight.
// Only those on and above the diagonal are computed.
template <typename T>
void InputCollector::AddProducts(const ConstMatrix& x, Weight& weight) {
  // Elements of a column that lie side by side in a panel (kernels/args.h).
  constexpr auto kGroup = static_cast<int64_t>(sizeof(float) / sizeof(T));
  const int64_t features = x.cols, panels = CeilDiv(features, kPanel);
  T* transposed = Reserve<T>(device_.allocator(), features * kRows, transposed_);
  T* packed = Reserve<T>(device_.allocator(), panels * kPanel * kRows, panels_);
  const auto slot = static_cast<size_t>(x.dtype);
  const auto gemm = device_.host_kernels().gemm[slot][slot];
  for (int64_t first = 0; first < x.rows; first += kRows) {
    const int64_t rows = std::min(kRows, x.rows - first);
    const int64_t padded = AlignUp(rows, kGroup);
    device_.host_pool().ParallelForItems(panels, [&](int64_t panel, int) {
      const int64_t begin = panel * kPanel, columns = std::min(kPanel, features - begin);
      T* to = packed + panel * padded * kPanel;
      std::fill_n(to, padded * kPanel, T{});
      for (int64_t row = 0; row < rows; ++row) {
        const T* from = RowOf<T>(x, first + row) + begin;
        T* lanes = to + row / kGroup * kGroup * kPanel + row % kGroup;
        for (int64_t i = 0; i < columns; ++i) {
          lanes[i * kGroup] = from[i];
          transposed[(begin + i) * padded + row] = from[i];
        }
      }
      if (padded == rows) return;
      for (int64_t i = 0; i < columns; ++i) transposed[(begin + i) * padded + rows] = T{};
    });
    // The last panels have most rows, so they come first.
    device_.host_pool().ParallelForItems(panels, [&](int64_t item, int) {
      const int64_t panel = panels - 1 - item;
      kernels::GemmArgs args{};
      args.a = transposed;
      args.lda = padded;
      args.w = packed;
      args.c = weight.statistics.products.data();
      args.ldc = features;
      args.m = std::min(features, (panel + 1) * kPanel);
      args.n = features;
      args.k = padded;
      args.panel_begin = panel;
      args.panel_end = panel + 1;
      args.accumulate = true;
      gemm(args);
    });
  }
}

std::optional<InputStatistics> InputCollector::Take(std::string_view tensor, int64_t part) {
  for (auto& [data, weight] : weights_) {
    if (weight.tensor != tensor || weight.part != part) continue;
    InputStatistics taken = TakeFrom(weight);
    if (!taken.products.empty()) Mirror(taken.num_features, taken.products);
    return taken;
  }
  return std::nullopt;
}

InputStatistics InputCollector::TakeFrom(Weight& weight) {
  InputStatistics taken;
  taken.num_features = weight.statistics.num_features;
  std::swap(taken, weight.statistics);
  return taken;
}

std::optional<InputCollector::NotFinite> InputCollector::TakeNotFinite() {
  return std::exchange(not_finite_, std::nullopt);
}

void InputCollector::Discard() {
  for (auto& [data, weight] : weights_) TakeFrom(weight);
  not_finite_.reset();
}

}  // namespace allspark
