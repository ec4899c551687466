// Mixture of experts: which experts a token has, and the sum of their outputs.
#pragma once

#include "kernels/cpu/rowwise.inl"

namespace allspark::kernels {
namespace {

// The best `wanted` of the offered values, best first; among equals, the one offered first. NaN
// counts as lowest.
struct BestFew {
  int64_t wanted;
  int64_t count = 0;
  float values[kMaxExpertsPerToken] = {};
  int32_t indices[kMaxExpertsPerToken] = {};

  __attribute__((always_inline)) void Offer(float value, int64_t index) {
    if (!(value == value)) value = kMinusInfinity;
    if (count == wanted && !(value > values[count - 1])) return;
    if (count < wanted) ++count;
    int64_t at = count - 1;
    for (; at > 0 && value > values[at - 1]; --at) {
      values[at] = values[at - 1];
      indices[at] = indices[at - 1];
    }
    values[at] = value;
    indices[at] = static_cast<int32_t>(index);
  }
};
static_assert(kMaxExpertGroups <= kMaxExpertsPerToken, "BestFew chooses groups, too.");

// scores[i] = e^(x[i] - the highest x); returns their sum.
static AS_ALWAYS_INLINE float Exponentials(const float* x, int64_t n, float* scores) {
  const VecF highest = Set1(Highest(x, n));
  VecF sum = Zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const Mask mask = FirstLanes(n - i);
    const VecF e = Exp(Sub(MaskLoadF(mask, x + i), highest));
    MaskStoreF(mask, scores + i, e);
    sum = Add(sum, Select(mask, e, Zero()));
  }
  return ReduceAdd(sum);
}

static AS_ALWAYS_INLINE void OfferGroups(const RouteArgs& args, const float* choice,
                                         BestFew* best) {
  const int64_t size = args.num_experts / args.groups;
  BestFew groups{args.used_groups};
  for (int64_t g = 0; g < args.groups; ++g) {
    BestFew within{args.score == RouterScore::kSigmoid && size > 1 ? 2 : 1};
    for (int64_t i = g * size; i < (g + 1) * size; ++i) within.Offer(choice[i], i);
    groups.Offer(within.values[0] + within.values[1], g);  // Unused values are 0.
  }
  bool used[kMaxExpertGroups] = {};
  for (int64_t g = 0; g < args.used_groups; ++g) used[groups.indices[g]] = true;
  for (int64_t i = 0; i < args.num_experts; ++i) {
    if (used[i / size]) best->Offer(choice[i], i);
  }
}

static AS_ALWAYS_INLINE void RouteRow(const RouteArgs& args, const float* x, int32_t* experts,
                                      float* weights) {
  alignas(64) float scores[kMaxRoutedExperts], biased[kMaxRoutedExperts];
  const int64_t n = args.num_experts;
  const bool softmax = args.score == RouterScore::kSoftmax;
  float sum = 1.0f;
  const float* choice = scores;
  if (softmax) {
    sum = Exponentials(x, n, scores);
    choice = x;
  } else {
    ForEachVec(
        n, [&](int64_t i, auto load, auto store)
               __attribute__((always_inline)) { store(scores + i, Sigmoid(load(x + i))); });
  }
  if (args.bias != nullptr) {
    const VecF total = Set1(sum);
    ForEachVec(
        n, [&](int64_t i, auto load, auto store) __attribute__((always_inline)) {
          store(biased + i, Add(Div(load(scores + i), total), load(args.bias + i)));
        });
    choice = biased;
  }
  BestFew best{args.top_k};
  if (args.used_groups < args.groups) {
    OfferGroups(args, choice, &best);
  } else {
    for (int64_t i = 0; i < n; ++i) best.Offer(choice[i], i);
  }
  if (args.normalize) {
    sum = 0;
    for (int64_t j = 0; j < args.top_k; ++j) sum += scores[best.indices[j]];
  }
  for (int64_t j = 0; j < args.top_k; ++j) {
    experts[j] = best.indices[j];
    weights[j] = scores[best.indices[j]] / sum * args.scale;
  }
  if (!args.has_shared) return;
  weights[args.top_k] = args.shared_gate ? FirstLane(Sigmoid(Set1(x[n]))) : 1.0f;
}

[[maybe_unused]] void Route(const RouteArgs& args) noexcept {
  const int64_t columns = args.top_k + (args.has_shared ? 1 : 0);
  for (int64_t r = 0; r < args.rows; ++r) {
    RouteRow(args, args.logits + r * args.ldx, args.experts + r * args.top_k,
             args.weights + r * columns);
  }
}

[[maybe_unused]] void Combine(const CombineArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    const int32_t* sources = args.sources + r * args.num_sources;
    const float* weights = args.weights + r * args.num_sources;
    float* y = args.y + r * args.ldy;
    ForEachVec(
        args.cols, [&](int64_t i, auto load, auto store) __attribute__((always_inline)) {
          VecF sum = Zero();
          for (int64_t j = 0; j < args.num_sources; ++j) {
            sum = Fma(Set1(weights[j]), load(args.x + sources[j] * args.ldx + i), sum);
          }
          store(y + i, args.accumulate ? Add(load(y + i), sum) : sum);
        });
  }
}

}  // namespace
}  // namespace allspark::kernels
