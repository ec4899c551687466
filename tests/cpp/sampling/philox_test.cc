#include "sampling/philox.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace allspark {
namespace {

// Known answers published with Random123 (tests/kat_vectors, philox4x32 of 10 rounds).
TEST(Philox, MatchesPublishedKnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UniformTakesItsBitsFromSeedAndPosition) {
  // The first known answer: (0xe169c58d6627e8d5 >> 11) / 2^53.
  EXPECT_EQ(PositionUniform(0, 0), static_cast<double>(0xe169c58d6627e8d5u >> 11) / 0x1.0p53);
  EXPECT_NE(PositionUniform(1, 0), PositionUniform(0, 1));
  // The high halves of seed and position count.
  EXPECT_NE(PositionUniform(uint64_t{1} << 32, 0), PositionUniform(0, 0));
  EXPECT_NE(PositionUniform(0, int64_t{1} << 32), PositionUniform(0, 0));
}

TEST(Philox, UniformIsUniformOverSeedsAndOverPositions) {
  constexpr int kDraws = 100000, kBins = 64;
  for (const bool over_seeds : {true, false}) {
    int bins[kBins] = {};
    for (int i = 0; i < kDraws; ++i) {
      const double u =
          over_seeds ? PositionUniform(static_cast<uint64_t>(i), 5) : PositionUniform(12345, i);
      ASSERT_GE(u, 0.0);
      ASSERT_LT(u, 1.0);
      ++bins[static_cast<int>(u * kBins)];
    }
    double chi_square = 0;
    for (const int n : bins) {
      const double expected = double{kDraws} / kBins;
      chi_square += (n - expected) * (n - expected) / expected;
    }
    // 63 degrees of freedom: P(chi^2 > 120) is about 2e-5; the seed is fixed, so no flakiness.
    EXPECT_LT(chi_square, 120.0) << "over_seeds " << over_seeds;
  }
}

}  // namespace
}  // namespace allspark
