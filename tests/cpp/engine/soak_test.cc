// The short form of the soak: two rounds in each cache mode, or more until what is common has
// occurred.

#include <algorithm>

#include "cpp/engine/soak_harness.h"

namespace allspark::testing {
namespace {

// In the long form everything must occur. One of these may be missing after two rounds, where
// requests end before their caller stops them; one pair of rounds in ten is like that.
constexpr const char* kCommon[] = {"end: length", "end: cancelled", "prefix hit"};
constexpr int64_t kMostRounds = 40;

TEST_P(SoakTest, EveryRequestGivesWhatItGivesAlone) {
  const std::unique_ptr<Soak> soak = MakeSoak(static_cast<uint64_t>(std::get<1>(GetParam())));
  soak->Start();
  const auto has_met = [&](const char* what) { return soak->Coverage().count(what) > 0; };
  const auto goes_on = [&] {
    return soak->num_rounds() < 2 ||
           (soak->num_rounds() < kMostRounds && !std::ranges::all_of(kCommon, has_met));
  };
  while (!HasFailure() && goes_on()) soak->Round(30, IsLockstep(soak->num_rounds()));
  for (const char* what : kCommon) EXPECT_TRUE(has_met(what)) << what;
}

INSTANTIATE_TEST_SUITE_P(
    Modes, SoakTest,
    ::testing::Values(std::make_tuple(proto::COMPUTE_FLOAT32, CacheMode::kDefault),
                      std::make_tuple(proto::COMPUTE_BFLOAT16, CacheMode::kQuantI8),
                      std::make_tuple(proto::COMPUTE_FLOAT32, CacheMode::kQuantU4)),
    ModeName);

}  // namespace
}  // namespace allspark::testing
