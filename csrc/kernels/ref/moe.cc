#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/ref/fill.h"
#include "kernels/ref/scalars.h"

namespace allspark::kernels {
namespace {

constexpr double kLowest = -std::numeric_limits<double>::infinity();

// The index of the highest value that is not taken, or -1; NaN counts as lowest.
int64_t BestOf(const double* values, const bool* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (taken[i]) continue;
    const double value = std::isnan(values[i]) ? kLowest : values[i];
    const double highest = best < 0 || std::isnan(values[best]) ? kLowest : values[best];
    if (best < 0 || value > highest) best = i;
  }
  return best;
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

void Scores(const RouteArgs& args, const float* x, double* scores) {
  if (args.score == RouterScore::kSigmoid) {
    for (int64_t i = 0; i < args.num_experts; ++i) scores[i] = Sigmoid(Load(x + i));
    return;
  }
  double highest = kLowest, sum = 0;
  // Not fmax: with it GCC 12 for Arm fails in this loop.
  for (int64_t i = 0; i < args.num_experts; ++i) highest = std::max(highest, Load(x + i));
  for (int64_t i = 0; i < args.num_experts; ++i) sum += scores[i] = std::exp(Load(x + i) - highest);
  for (int64_t i = 0; i < args.num_experts; ++i) scores[i] /= sum;
}

// Marks the experts of all groups except the best as taken.
void LeaveGroups(const RouteArgs& args, const double* choice, bool* taken) {
  const int64_t size = args.num_experts / args.groups;
  const int64_t counted = args.score == RouterScore::kSigmoid && size > 1 ? 2 : 1;
  double quality[kMaxExpertGroups];
  bool used[kMaxExpertGroups] = {};
  for (int64_t g = 0; g < args.groups; ++g) {
    bool seen[kMaxRoutedExperts] = {};
    quality[g] = 0;
    for (int64_t i = 0; i < counted; ++i) {
      const int64_t best = BestOf(choice + g * size, seen, size);
      seen[best] = true;
      quality[g] += choice[g * size + best];
    }
  }
  for (int64_t i = 0; i < args.used_groups; ++i) used[BestOf(quality, used, args.groups)] = true;
  for (int64_t i = 0; i < args.num_experts; ++i) taken[i] = !used[i / size];
}

void RouteRow(const RouteArgs& args, const float* x, int32_t* experts, float* weights) {
  double scores[kMaxRoutedExperts], choice[kMaxRoutedExperts], sum = 0;
  bool taken[kMaxRoutedExperts] = {};
  Scores(args, x, scores);
  const bool by_logits = args.score == RouterScore::kSoftmax && args.bias == nullptr;
  for (int64_t i = 0; i < args.num_experts; ++i) {
    choice[i] = by_logits ? Load(x + i) : scores[i];
    if (args.bias != nullptr) choice[i] += Load(args.bias + i);
  }
  if (args.used_groups < args.groups) LeaveGroups(args, choice, taken);
  for (int64_t j = 0; j < args.top_k; ++j) {
    const int64_t best = BestOf(choice, taken, args.num_experts);
    taken[best] = true;
    experts[j] = static_cast<int32_t>(best);
    sum += scores[best];
  }
  for (int64_t j = 0; j < args.top_k; ++j) {
    Store(weights + j, scores[experts[j]] / (args.normalize ? sum : 1.0) * Load(&args.scale));
  }
  if (args.has_shared) {
    Store(weights + args.top_k, args.shared_gate ? Sigmoid(Load(x + args.num_experts)) : 1.0);
  }
}

void Route(const RouteArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    RouteRow(args, args.logits + r * args.ldx, args.experts + r * args.top_k,
             args.weights + r * (args.top_k + (args.has_shared ? 1 : 0)));
  }
}

void Combine(const CombineArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    const int32_t* sources = args.sources + r * args.num_sources;
    const float* weights = args.weights + r * args.num_sources;
    for (int64_t i = 0; i < args.cols; ++i) {
      float* y = args.y + r * args.ldy + i;
      double sum = args.accumulate ? Load(y) : 0.0;
      for (int64_t j = 0; j < args.num_sources; ++j) {
        sum += Load(weights + j) * Load(args.x + sources[j] * args.ldx + i);
      }
      Store(y, sum);
    }
  }
}

}  // namespace

void FillMoeReference(KernelTable& table) noexcept {
  table.route = Route;
  table.combine = Combine;
}

}  // namespace allspark::kernels
