#include "sampling/logprobs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "support/constants.h"

namespace allspark {
namespace {

using testing::kInf;
using testing::kNan;

RowLogprobs Logprobs(const std::vector<float>& logits, int32_t token, size_t num_top) {
  RowLogprobs result;
  result.top.resize(num_top, {99, 99});
  ComputeLogprobs(*kernels::DefaultTable(), logits.data(), static_cast<int64_t>(logits.size()),
                  token, result);
  return result;
}

TEST(Logprobs, AreThoseOfASortedRow) {
  std::mt19937 random(3);
  for (const int64_t vocab_size : {1, 7, 500, 5003}) {
    std::vector<float> logits(static_cast<size_t>(vocab_size));
    // Rounded, so that there are ties.
    for (float& x : logits) x = std::round(std::normal_distribution<float>(0, 20)(random));
    std::vector<int32_t> order(logits.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    });
    long double sum = 0;
    for (float x : logits) sum += std::exp(static_cast<long double>(x));
    const auto expected = [&](int32_t token) {
      return static_cast<double>(logits[static_cast<size_t>(token)] - std::log(sum));
    };
    const RowLogprobs result = Logprobs(logits, order.back(), 20);
    EXPECT_NEAR(result.chosen, expected(order.back()), 1e-5);
    for (size_t i = 0; i < result.top.size(); ++i) {
      if (i >= order.size()) {
        EXPECT_EQ(result.top[i].token, -1);
        continue;
      }
      EXPECT_EQ(result.top[i].token, order[i]);
      EXPECT_NEAR(result.top[i].logprob, expected(order[i]), 1e-5);
    }
  }
}

TEST(Logprobs, ValuesThatAreNoNumbers) {
  const RowLogprobs banned = Logprobs({1, -kInf, kNan, 1}, 3, 3);
  EXPECT_FLOAT_EQ(banned.chosen, std::log(0.5f));
  EXPECT_EQ(banned.top[0].token, 0);
  EXPECT_EQ(banned.top[1].token, 3);
  EXPECT_EQ(banned.top[2].token, -1);
  const RowLogprobs infinite = Logprobs({1, kInf, kInf, 2}, 2, 3);
  EXPECT_FLOAT_EQ(infinite.chosen, std::log(0.5f));
  EXPECT_EQ(infinite.top[0].token, 1);
  EXPECT_EQ(infinite.top[2].token, 3);
  EXPECT_EQ(infinite.top[2].logprob, -kInf);
  EXPECT_EQ(Logprobs({1, kInf}, 0, 0).chosen, -kInf) << "a raw one may be without probability";
  // A prompt's next token is the prompt's choice, whatever its logit.
  EXPECT_EQ(Logprobs({1, kNan}, 1, 0).chosen, -kInf);
  for (const float none : {kNan, -kInf}) {
    const RowLogprobs empty = Logprobs({none, none}, 1, 1);
    EXPECT_EQ(empty.chosen, -kInf);
    EXPECT_EQ(empty.top[0].token, -1);
  }
}

}  // namespace
}  // namespace allspark
