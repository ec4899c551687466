// Error bounds of the kernels, derived from the arithmetic they do. u is the unit roundoff: half
// the relative distance between adjacent numbers. A bound is never a bare number in a test.
#pragma once

#include <cmath>
#include <cstdint>

namespace allspark::testing {

inline constexpr double kFloatRoundoff = 0x1p-24;
inline constexpr double kBf16Roundoff = 0x1p-8;
// Below this, results may be flushed to zero or lose bits.
inline constexpr double kFloatTiny = 0x1p-126;

// Relative error of n roundings one after the other (Higham's gamma).
inline double Gamma(double n) { return n * kFloatRoundoff / (1 - n * kFloatRoundoff); }

// A float32 sum of k products in any order, its bias and its residual included.
// sum_abs: the sum of the absolute values of all terms.
inline double DotBound(int64_t k, double sum_abs) {
  return Gamma(static_cast<double>(k) + 2) * sum_abs + static_cast<double>(k) * kFloatTiny;
}

// A float32 result's bound, plus the error of storing it as bfloat16 (0 for float32).
inline double StoreBound(bool bf16, double expected, double bound) {
  return bf16 ? (std::fabs(expected) + bound) * kBf16Roundoff + bound + 0x1p-133 : bound;
}

// y = x / sqrt(mean(x^2) + eps) * weight. The squares are summed in at least 32 lanes (a relative
// error, as all are positive); the square root halves it; mean, eps, root, division and two
// products follow.
inline double RmsNormBound(int64_t cols, double expected) {
  const double chain = static_cast<double>(cols) / 32 + 12;
  return Gamma(chain / 2 + 8) * std::fabs(expected) + kFloatTiny;
}

// y = (x - mean) / sqrt(variance + eps) * weight + bias. mean_abs: of |x|; scale: 1 / sqrt(variance
// + eps); gain: |weight| * scale; centered: |x - mean|. The mean is a sum in at least 16 lanes. Its
// error moves every element alike, and the variance by its square. The rest is as in RmsNormBound.
inline double LayerNormBound(int64_t cols, double mean_abs, double scale, double gain,
                             double centered, double expected) {
  const double chain = static_cast<double>(cols) / 16 + 12;
  const double mean = Gamma(chain) * mean_abs;
  const double relative = Gamma(chain / 2 + 10) + mean * scale * mean * scale;
  return gain * (mean + (centered + mean) * relative) + Gamma(2) * std::fabs(expected) + kFloatTiny;
}

// act(gate) * up. Functions built on the vector exponential (3 u at most): a handful of roundings
// around it, and the exponent's own rounding, which the exponential turns into a relative error of
// `exponent` u. Where e^-gate overflows, the result is zero instead of gate * 2^-128 at most.
inline double ActivationBound(double exponent, double expected, double gate, double up) {
  return Gamma(24 + 4 * std::fabs(exponent)) * std::fabs(expected) +
         kFloatTiny * (1 + std::fabs(gate)) * (1 + std::fabs(up));
}

// Rotation: two products and a sum.
inline double RopeBound(double u, double v) {
  return 2 * kFloatRoundoff * (std::fabs(u) + std::fabs(v));
}

// An attention kernel's rounding errors besides those of float32 arithmetic.
struct AttentionRounding {
  double score = 0;   // of queries: absolute error of a score
  double weight = 0;  // of weights, after they entered the denominator: relative
  double value = 0;   // the same, as an absolute error of the element
};

// Attention of one element. score_abs: the largest over the keys of scale * sum |q||k|;
// score_limit: the largest absolute score; value_abs: the sum of weight * |value|, weights summing
// to 1. A score's error becomes a relative error of its weight and of the denominator; sums run
// over 256 keys and the chunks' merges.
inline double AttentionBound(int64_t head_dim, int64_t num_keys, double score_abs,
                             double score_limit, double value_abs,
                             const AttentionRounding& rounding) {
  const double chunks = static_cast<double>(num_keys) / 256 + 1;
  const double score_error = Gamma(static_cast<double>(head_dim) + 8) * score_abs +
                             8 * kFloatRoundoff * score_limit + rounding.score;
  const double sums = Gamma(2 * 256 + 24 + 16 * chunks);
  // The score error after two exponentials, to second order.
  const double weight_error = 2 * score_error * (1 + 2 * score_error);
  return (weight_error + sums + rounding.weight) * 1.01 * value_abs + rounding.value + kFloatTiny;
}

}  // namespace allspark::testing
