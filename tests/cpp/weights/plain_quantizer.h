// The quantiser in plain double arithmetic, written from weights/README.md; the tests compare
// csrc/weights/quantize.cc with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/dtype.h"

namespace allspark::testing {

struct PlainGroup {
  double scale = 0.0;
  int zero = 0;
  std::vector<int> values;
  double error = 0.0;  // sum of squares

  double Value(size_t i) const { return (values[i] - zero) * scale; }
};

// The smallest bfloat16 (8 significant bits) of at least x.
inline double PlainScale(double x) {
  int exponent;
  const double fraction = std::frexp(std::max(x, std::ldexp(1.0, -125)), &exponent);
  return std::ldexp(std::ceil(fraction * 256.0), exponent - 8);
}

inline PlainGroup PlainOnGrid(const std::vector<float>& group, double scale, int zero, int low,
                              int high) {
  PlainGroup result{scale, zero, {}, 0.0};
  for (const double w : group) {
    const double q = std::clamp(std::nearbyint(w / scale), double(low), double(high));
    result.values.push_back(static_cast<int>(q) + zero);
    result.error += (w - q * scale) * (w - q * scale);
  }
  return result;
}

// The groups that may be stored: two if their sums of squares are equal within rounding, else only
// the better one.
inline std::vector<PlainGroup> PlainQuantize(const std::vector<float>& group, int bits,
                                             bool asymmetric) {
  double low = 0.0;
  double high = 0.0;
  for (const double w : group) {
    low = std::min(low, w);
    high = std::max(high, w);
  }
  const int top = (1 << bits) - 1;
  const int half = 1 << (bits - 1);
  if (std::max(-low, high) < std::ldexp(1.0, -126)) {
    const int zero = asymmetric ? 0 : half;
    return {{0.0, zero, std::vector<int>(group.size(), zero), 0.0}};
  }
  if (asymmetric) {
    const double scale = PlainScale((high - low) / top);
    const int zero = std::clamp(static_cast<int>(std::nearbyint(-low / scale)), 0, top);
    return {PlainOnGrid(group, scale, zero, -zero, top - zero)};
  }
  const double largest = std::max(-low, high);
  const PlainGroup even =
      PlainOnGrid(group, PlainScale(largest / (half - 1)), half, 1 - half, half - 1);
  if (bits == 8) return {even};
  const double sign = high > -low ? -1.0 : 1.0;
  const PlainGroup full =
      PlainOnGrid(group, sign * PlainScale(largest / half), half, -half, half - 1);
  if (std::abs(full.error - even.error) <= 1e-6 * even.error) return {even, full};
  return {full.error < even.error ? full : even};
}

// The same with a search of 4-bit scales: all groups whose error is the least, within rounding.
inline std::vector<PlainGroup> PlainSearch(const std::vector<float>& group, bool asymmetric) {
  std::vector<PlainGroup> tried = PlainQuantize(group, 4, asymmetric);
  const float low = std::min(0.0f, *std::ranges::min_element(group));
  const size_t num_full = tried.size();  // two where it is open which of them is narrowed
  for (size_t full = 0; full < num_full && tried[full].scale != 0.0; ++full) {
    for (int step = 1; step <= 12; ++step) {
      const float part = 1.0f - static_cast<float>(step) / 20.0f;
      const float scale = ToFloat(ToBFloat16(static_cast<float>(tried[full].scale) * part));
      if (std::abs(scale) < 0x1p-125f) break;
      const float zero_at = -low * part / scale;
      const int zero = asymmetric ? std::min(static_cast<int>(std::nearbyint(zero_at)), 15) : 8;
      tried.push_back(PlainOnGrid(group, scale, zero, -zero, 15 - zero));
    }
  }
  const double least = std::ranges::min(tried, {}, &PlainGroup::error).error;
  std::erase_if(tried, [&](const PlainGroup& each) { return each.error > least * (1 + 1e-6); });
  return tried;
}

}  // namespace allspark::testing
