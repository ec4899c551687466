#include "model/context_extension.h"

#include <cmath>
#include <string>

namespace allspark {
namespace {

// Far above the rounding errors of powers of inv_freq[1], far below the effect of any scaling.
constexpr double kTolerance = 1e-3;

bool IsUnscaled(std::span<const float> inv_freq) {
  double expected = 1.0;
  for (const float frequency : inv_freq) {
    if (!(std::abs(double(frequency) - expected) <= kTolerance * expected)) return false;
    expected *= double(inv_freq[1]);
  }
  return true;
}

Status Refuse(double factor, const std::string& why) {
  return Status::InvalidArgument("rope_scaling_factor is " + std::to_string(factor) + ", but " +
                                 why);
}

}  // namespace

Result<std::vector<float>> ExtendFrequencies(std::span<const float> inv_freq, double factor,
                                             int64_t max_length, int64_t trained_length) {
  if (inv_freq.size() < 2) {
    return Refuse(factor, "the model has no rotary embedding of 4 dimensions or more");
  }
  if (!IsUnscaled(inv_freq)) {
    return Refuse(factor, "the model's rope frequencies are scaled already; it must be 0");
  }
  std::vector<float> extended(inv_freq.begin(), inv_freq.end());
  if (max_length <= trained_length) return extended;
  const double growth =
      factor * static_cast<double>(max_length) / static_cast<double>(trained_length) - (factor - 1);
  const double pairs = static_cast<double>(inv_freq.size());
  for (size_t i = 0; i < extended.size(); ++i) {
    // The factor is (new base / old base) ^ (-i / pairs).
    const double share = static_cast<double>(i) / (pairs - 1);
    extended[i] = static_cast<float>(double(extended[i]) * std::pow(growth, -share));
  }
  return extended;
}

}  // namespace allspark
