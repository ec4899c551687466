#include "model/context_extension.h"

#include <gtest/gtest.h>

#include <cmath>

namespace allspark {
namespace {

std::vector<float> Frequencies(double base, int pairs) {
  std::vector<float> frequencies;
  for (int i = 0; i < pairs; ++i) {
    frequencies.push_back(static_cast<float>(std::pow(base, -double(i) / pairs)));
  }
  return frequencies;
}

TEST(ContextExtensionTest, FrequenciesAreThoseOfTheLargerBase) {
  constexpr int kPairs = 32;
  const auto extended = ExtendFrequencies(Frequencies(1e4, kPairs), 2.0, 1000, 100);
  ASSERT_TRUE(extended.ok()) << extended.status().ToString();
  // 2 * 1000 / 100 - (2 - 1)
  const double base = 1e4 * std::pow(19.0, 64.0 / 62.0);
  const std::vector<float> expected = Frequencies(base, kPairs);
  for (size_t i = 0; i < kPairs; ++i) {
    // Each of the two roundings errs by at most half a unit in the last place.
    EXPECT_NEAR((*extended)[i], expected[i], 0x1p-22 * double(expected[i])) << i;
  }
}

TEST(ContextExtensionTest, UpToTheTrainedLengthNothingChanges) {
  const std::vector<float> frequencies = Frequencies(5e5, 64);
  EXPECT_EQ(*ExtendFrequencies(frequencies, 4.0, 100, 100), frequencies);
  EXPECT_EQ(*ExtendFrequencies(frequencies, 1.0, 40, 100), frequencies);
}

TEST(ContextExtensionTest, RefusesFrequenciesThatCannotBeExtended) {
  const auto refusal = [](const std::vector<float>& frequencies) {
    return ExtendFrequencies(frequencies, 2.0, 200, 100).status().ToString();
  };
  EXPECT_NE(refusal({}).find("rope_scaling_factor is 2"), std::string::npos);
  EXPECT_NE(refusal({}).find("no rotary embedding"), std::string::npos);
  std::vector<float> linear = Frequencies(1e4, 16);
  for (float& frequency : linear) frequency /= 8;
  EXPECT_NE(refusal(linear).find("scaled already"), std::string::npos);
  std::vector<float> slow = Frequencies(1e4, 16);
  slow.back() /= 8;
  EXPECT_NE(refusal(slow).find("scaled already"), std::string::npos);
  EXPECT_NE(refusal({1.0f, NAN}).find("scaled already"), std::string::npos);
}

}  // namespace
}  // namespace allspark
