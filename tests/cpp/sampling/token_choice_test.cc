#include "sampling/token_choice.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "cpp/sampling/choice_oracle.h"
#include "sampling/philox.h"
#include "support/constants.h"

namespace allspark {
namespace {

using testing::OracleDistribution;
using testing::OracleDraws;
using testing::OracleParams;

using testing::kInf;
using testing::kNan;
constexpr float kMax = std::numeric_limits<float>::max();

int32_t Choose(const std::vector<float>& logits, const OracleParams& params, double u) {
  std::vector<TokenCandidate> scratch(logits.size());
  return ChooseToken(
      logits.data(), static_cast<int64_t>(logits.size()),
      {.temperature = params.temperature, .top_k = params.top_k, .top_p = params.top_p}, u,
      scratch.data());
}

// Every token that some number of a fine grid in [0, 1) gives.
std::set<int32_t> Reachable(const std::vector<float>& logits, const OracleParams& params) {
  std::set<int32_t> result;
  for (int i = 0; i < 512; ++i) result.insert(Choose(logits, params, i / 512.0));
  return result;
}

TEST(TokenChoice, WalksTokensByLogitThenId) {
  // Probabilities 1/4, 1/2, 1/4: the order of the walk is 1, 0, 2.
  const std::vector<float> logits = {0, std::log(2.0f), 0};
  EXPECT_EQ(Choose(logits, {}, 0.0), 1);
  EXPECT_EQ(Choose(logits, {}, 0.49), 1);
  EXPECT_EQ(Choose(logits, {}, 0.51), 0);
  EXPECT_EQ(Choose(logits, {}, 0.74), 0);
  EXPECT_EQ(Choose(logits, {}, 0.76), 2);
  EXPECT_EQ(Choose(logits, {}, 0x1.fffffffffffffp-1), 2);
}

TEST(TokenChoice, TopKKeepsTiesAtItsEdge) {
  const std::vector<float> logits = {1, 3, 2, 2, 0, 2};
  EXPECT_EQ(Reachable(logits, {.top_k = 1}), (std::set<int32_t>{1}));
  EXPECT_EQ(Reachable(logits, {.top_k = 2}), (std::set<int32_t>{1, 2, 3, 5}));
  EXPECT_EQ(Reachable(logits, {.top_k = 4}), (std::set<int32_t>{1, 2, 3, 5}));
  EXPECT_EQ(Reachable(logits, {.top_k = 5}), (std::set<int32_t>{0, 1, 2, 3, 5}));
  EXPECT_EQ(Reachable(logits, {.top_k = 6}).size(), 6u);
  EXPECT_EQ(Reachable(logits, {.top_k = 1000}).size(), 6u);
  EXPECT_EQ(Reachable({5, 5, 5}, {.top_k = 1}), (std::set<int32_t>{0, 1, 2}));
}

TEST(TokenChoice, TopPKeepsTheShortestBeginningThatReachesIt) {
  const std::vector<float> equal = {0, 0, 0, 0};
  EXPECT_EQ(Reachable(equal, {.top_p = 0.0}), (std::set<int32_t>{0}));
  EXPECT_EQ(Reachable(equal, {.top_p = 0.25}), (std::set<int32_t>{0}));
  EXPECT_EQ(Reachable(equal, {.top_p = 0.26}), (std::set<int32_t>{0, 1}));
  EXPECT_EQ(Reachable(equal, {.top_p = 0.5}), (std::set<int32_t>{0, 1}));
  EXPECT_EQ(Reachable(equal, {.top_p = 0.76}), (std::set<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(Reachable(equal, {.top_p = 1.0}), (std::set<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(Reachable({0, 4, 1}, {.top_p = 0.0}), (std::set<int32_t>{1}));
  EXPECT_EQ(Reachable(equal, {.top_p = kNan}).size(), 4u);
}

TEST(TokenChoice, TopPIsOfWhatTopKKept) {
  // The first token has 1/8 of all probability, and half of the two tokens that top_k keeps.
  std::vector<float> logits(14, 0.0f);
  logits[3] = logits[9] = std::log(2.0f);
  EXPECT_EQ(Reachable(logits, {.top_k = 2, .top_p = 0.5}), (std::set<int32_t>{3}));
  EXPECT_EQ(Reachable(logits, {.top_k = 2, .top_p = 0.51}), (std::set<int32_t>{3, 9}));
}

TEST(TokenChoice, TemperatureComesBeforeTopP) {
  const std::vector<float> logits = {0, 1, 2};
  EXPECT_EQ(Reachable(logits, {.temperature = 0.1, .top_p = 0.9}), (std::set<int32_t>{2}));
  EXPECT_EQ(Reachable(logits, {.temperature = 1e6, .top_p = 0.9}).size(), 3u);
}

TEST(TokenChoice, ExtremeTemperatures) {
  const std::vector<float> logits = {-3, 7, 6.999f, 7};
  EXPECT_EQ(Reachable(logits, {.temperature = 1e-5}), (std::set<int32_t>{1, 3}));
  EXPECT_EQ(Reachable(logits, {.temperature = 1e6}).size(), 4u);
  EXPECT_EQ(Reachable(logits, {.temperature = kInf}).size(), 4u);
  EXPECT_EQ(Reachable({kMax, -kMax, 0}, {.temperature = 1e-5}), (std::set<int32_t>{0}));
  EXPECT_EQ(Reachable({kMax, -kMax, 0}, {.temperature = kInf}).size(), 3u);
}

TEST(TokenChoice, NanAndMinusInfinityAreNeverChosen) {
  const std::vector<float> logits = {kNan, 1, -kInf, 2, kNan};
  for (const int64_t top_k : {0, 1, 2, 3, 4, 5, 9}) {
    for (const double top_p : {0.0, 0.5, 1.0}) {
      const auto reachable = Reachable(logits, {.top_k = top_k, .top_p = top_p});
      EXPECT_TRUE(reachable.count(3));
      EXPECT_EQ(reachable.count(1), top_p == 1.0 && top_k != 1 ? 1u : 0u) << top_k << " " << top_p;
      EXPECT_EQ(reachable.size(), 1 + reachable.count(1));
    }
  }
  EXPECT_EQ(Choose({kNan, -kInf}, {}, 0.5), -1);
  EXPECT_EQ(Choose({kNan, -kInf, kNan}, {.top_k = 2, .top_p = 0.5}, 0.5), -1);
  EXPECT_EQ(Choose({-kInf}, {.top_k = 1}, 0.0), -1);
  EXPECT_EQ(Choose({-kMax, -kInf}, {}, 0.9), 0);
}

TEST(TokenChoice, PlusInfinityTakesAllProbability) {
  const std::vector<float> logits = {kMax, kInf, kNan, 0, kInf, -kInf};
  EXPECT_EQ(Reachable(logits, {}), (std::set<int32_t>{1, 4}));
  EXPECT_EQ(Reachable(logits, {.top_k = 1}), (std::set<int32_t>{1, 4}));
  EXPECT_EQ(Reachable(logits, {.top_k = 4}), (std::set<int32_t>{1, 4}));
  EXPECT_EQ(Reachable(logits, {.top_p = 0.4}), (std::set<int32_t>{1}));
}

struct Shape {
  const char* name;
  float (*draw)(std::mt19937&);
};

const Shape kShapes[] = {
    {"normal", [](std::mt19937& r) { return std::normal_distribution<float>(0, 4)(r); }},
    {"few values", [](std::mt19937& r) { return static_cast<float>(r() % 5); }},
    {"all equal", [](std::mt19937&) { return -1.5f; }},
    {"masked low",
     [](std::mt19937& r) { return r() % 3 ? -1e30f : std::normal_distribution<float>(0, 2)(r); }},
    {"huge", [](std::mt19937& r) { return std::normal_distribution<float>(0, 1e37f)(r); }},
    {"holes",
     [](std::mt19937& r) {
       const float holes[] = {kNan, -kInf, 0.0f, -0.0f};
       const uint32_t which = r() % 8;
       return which < 4 ? holes[which] : std::normal_distribution<float>(0, 3)(r);
     }},
    {"tiny steps", [](std::mt19937& r) { return 1.0f + static_cast<float>(r() % 9) * 1e-7f; }},
};

TEST(TokenChoice, MatchesTheOracleOnRandomRows) {
  std::mt19937 random(1234);
  const int64_t sizes[] = {1, 2, 7, 127, 128, 129, 1000, 1025, 2100};
  const double temperatures[] = {1e-5, 0.01, 0.7, 1, 3, 1e6};
  const double top_ps[] = {0, 0.1, 0.5, 0.9, 0.999, 1};
  int64_t ambiguous = 0, draws = 0;
  for (const Shape& shape : kShapes) {
    for (const int64_t size : sizes) {
      for (int repeat = 0; repeat < 24; ++repeat) {
        std::vector<float> logits(static_cast<size_t>(size));
        for (float& logit : logits) logit = shape.draw(random);
        if (repeat % 8 == 5) logits[random() % logits.size()] = kInf;
        const int64_t top_ks[] = {0, 1, 2, 50, size - 1, size, 2000, 1 << 30};
        const OracleParams params{.temperature = temperatures[random() % 6],
                                  .top_k = top_ks[random() % 8],
                                  .top_p = top_ps[random() % 6]};
        const double u = repeat % 8 ? PositionUniform(random(), repeat)
                                    : (repeat % 16 ? 0.0 : 0x1.fffffffffffffp-1);
        const std::set<int32_t> allowed = OracleDraws(logits, params, u);
        ++draws;
        ambiguous += allowed.size() > 1;
        ASSERT_TRUE(allowed.count(Choose(logits, params, u)))
            << shape.name << ", " << size << " tokens, temperature " << params.temperature
            << ", top_k " << params.top_k << ", top_p " << params.top_p << ", u " << u << ": "
            << Choose(logits, params, u) << " instead of " << *allowed.begin();
      }
    }
  }
  // Equal weights and round bounds sometimes meet at an edge. If that were frequent, the test would
  // say little.
  EXPECT_LT(ambiguous * 5, draws) << ambiguous << " of " << draws;
}

// A selection could be wrong or slow for some orders of the logits.
TEST(TokenChoice, SortedRowsMatchTheOracle) {
  constexpr int kSize = 6000;
  std::vector<float> up(kSize), down(kSize);
  for (int i = 0; i < kSize; ++i) {
    up[static_cast<size_t>(i)] = static_cast<float>(i / 3) * 0.01f;  // In threes: ties.
    down[static_cast<size_t>(kSize - 1 - i)] = up[static_cast<size_t>(i)];
  }
  for (const int64_t top_k : {0, 1, 50, 700, 5999}) {
    for (const double top_p : {0.3, 0.95, 1.0}) {
      for (const double u : {0.0, 0.123, 0.77, 0.999}) {
        const OracleParams params{.temperature = 1.3, .top_k = top_k, .top_p = top_p};
        EXPECT_TRUE(OracleDraws(up, params, u).count(Choose(up, params, u))) << top_k;
        EXPECT_TRUE(OracleDraws(down, params, u).count(Choose(down, params, u))) << top_k;
      }
    }
  }
}

TEST(TokenChoice, DrawsOverSeedsFollowTheDistribution) {
  constexpr int kDraws = 100000;
  std::vector<float> logits(150);
  std::mt19937 random(5);
  for (float& logit : logits) logit = std::normal_distribution<float>(0, 2)(random);
  for (const OracleParams& params :
       {OracleParams{.temperature = 0.8}, OracleParams{.temperature = 0.8, .top_k = 20},
        OracleParams{.temperature = 1.5, .top_p = 0.8},
        OracleParams{.temperature = 1, .top_k = 40, .top_p = 0.9}}) {
    std::map<int32_t, int> counts;
    for (int seed = 0; seed < kDraws; ++seed) {
      ++counts[Choose(logits, params, PositionUniform(static_cast<uint64_t>(seed), 11))];
    }
    double chi_square = 0, rest_p = 1;
    int bins = 0, rest = kDraws;
    for (const auto& [id, p] : OracleDistribution(logits, params)) {
      if (p * kDraws < 10) continue;  // Too rare for a bin of its own: all such tokens share one.
      chi_square += std::pow(counts[id] - p * kDraws, 2) / (p * kDraws);
      rest -= counts[id];
      rest_p -= p;
      ++bins;
    }
    if (rest_p * kDraws > 10) {
      chi_square += std::pow(rest - rest_p * kDraws, 2) / (rest_p * kDraws);
    } else {
      EXPECT_LT(rest, 40);
      --bins;
    }
    // Mean `bins`, standard deviation sqrt(2 * bins): five of them.
    EXPECT_LT(chi_square, bins + 5 * std::sqrt(2.0 * bins)) << bins << " degrees of freedom";
  }
}

}  // namespace
}  // namespace allspark
