#include "model/panel_matrix.h"

#include <cmath>
#include <vector>

#include "base/int_math.h"
#include "kernels/args.h"
#include "tensor/tensor_view.h"
#include "weights/quantize.h"

namespace allspark {

bool StoreElement(DType dtype, void* base, int64_t index, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(base)[index] = value;
    return std::isfinite(value);
  }
  const BFloat16 rounded = ToBFloat16(value);
  static_cast<BFloat16*>(base)[index] = rounded;
  return std::isfinite(ToFloat(rounded));
}

PanelMatrix::PanelMatrix(DType dtype, int64_t rows, int64_t k, int64_t width, int64_t scale_group)
    : dtype_(dtype), k_(k), width_(width), scale_group_(scale_group) {
  const int64_t padded = AlignUp(rows, width);
  element_bytes_ = AlignUp(padded * k * ElementBytes(dtype), kPackedAlignment);
  if (dtype != DType::kInt8) return;
  scale_bytes_ =
      AlignUp(padded * (k / scale_group) * ElementBytes(DType::kBFloat16), kPackedAlignment);
}

int64_t PanelMatrix::IndexOf(int64_t row, int64_t k, int64_t group) const {
  return ((row / width_ * (k_ / group) + k / group) * width_ + row % width_) * group + k % group;
}

bool PanelMatrix::PutRow(void* base, int64_t row, const float* values) const {
  if (dtype_ == DType::kInt8) return PutQuantized(base, row, values);
  const int64_t group = kernels::PackGroup(ElementBytes(dtype_));
  bool finite = true;
  for (int64_t i = 0; i < k_; ++i) {
    finite &= StoreElement(dtype_, base, IndexOf(row, i, group), values[i]);
  }
  return finite;
}

bool PanelMatrix::PutQuantized(void* base, int64_t row, const float* values) const {
  const int64_t num_scales = k_ / scale_group_;
  std::vector<unsigned char> bytes(static_cast<size_t>(k_));
  std::vector<BFloat16> scales(static_cast<size_t>(num_scales));
  const weights::QuantFormat format{.bits = 8, .group_size = scale_group_};
  if (!weights::QuantizeRow(reinterpret_cast<const unsigned char*>(values), DType::kFloat32, k_,
                            format, bytes.data(), scales.data(), /*zeros=*/nullptr)) {
    return false;
  }
  auto* elements = static_cast<unsigned char*>(base);
  auto* stored = reinterpret_cast<BFloat16*>(elements + scale_offset());
  for (int64_t i = 0; i < k_; ++i) elements[IndexOf(row, i, 4)] = bytes[static_cast<size_t>(i)];
  for (int64_t i = 0; i < num_scales; ++i) {
    stored[(row / width_ * num_scales + i) * width_ + row % width_] =
        scales[static_cast<size_t>(i)];
  }
  return true;
}

}  // namespace allspark
