// A plain implementation of token_choice.h's distribution: sorts everything, sums in long double.
// Shares no code with token_choice.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <utility>
#include <vector>

namespace allspark::testing {

struct OracleParams {
  double temperature = 1;
  int64_t top_k = 0;
  double top_p = 1;
};

// The kept tokens in order, with probabilities that sum to 1.
inline std::vector<std::pair<int32_t, double>> OracleDistribution(const std::vector<float>& logits,
                                                                  const OracleParams& params) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::vector<std::pair<double, int32_t>> tokens;
  bool infinite = false;
  for (size_t i = 0; i < logits.size(); ++i) infinite |= logits[i] == kInfinity;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i]) || logits[i] == -kInfinity) continue;
    if (infinite && logits[i] != kInfinity) continue;
    tokens.push_back({infinite ? 0.0 : -double{logits[i]}, static_cast<int32_t>(i)});
  }
  std::sort(tokens.begin(), tokens.end());  // By logit descending, then by id.
  if (params.top_k > 0 && params.top_k < static_cast<int64_t>(tokens.size())) {
    const double edge = tokens[static_cast<size_t>(params.top_k) - 1].first;
    while (tokens.back().first > edge) tokens.pop_back();
  }
  long double total = 0;
  std::vector<long double> weights;
  for (const auto& token : tokens) {
    weights.push_back(
        std::exp((static_cast<long double>(tokens[0].first) - token.first) / params.temperature));
    total += weights.back();
  }
  std::vector<std::pair<int32_t, double>> result;
  long double kept = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0 && params.top_p < 1 && kept >= params.top_p * total) break;
    kept += weights[i];
    result.push_back({tokens[i].second, static_cast<double>(weights[i])});
  }
  for (auto& [id, p] : result) p = static_cast<double>(p / kept);
  return result;
}

inline int32_t OracleDraw(const std::vector<std::pair<int32_t, double>>& distribution, double u) {
  if (distribution.empty()) return -1;
  double sum = 0;
  int32_t last = distribution[0].first;
  for (const auto& [id, p] : distribution) {
    sum += p;
    if (p > 0) last = id;
    if (sum > u) return id;
  }
  return last;
}

// The tokens that a draw may give when sums are rounded: one, but two within 1e-11 of an edge.
inline std::set<int32_t> OracleDraws(const std::vector<float>& logits, const OracleParams& params,
                                     double u) {
  constexpr double kRounding = 1e-11;
  std::set<int32_t> result;
  for (const double dp : {0.0, -kRounding, kRounding}) {
    OracleParams shifted = params;
    if (params.top_p < 1) shifted.top_p += dp;
    const auto distribution = OracleDistribution(logits, shifted);
    for (const double du : {0.0, -kRounding, kRounding}) {
      result.insert(OracleDraw(distribution, u + du));
    }
  }
  return result;
}

}  // namespace allspark::testing
