// The short form of the soak: two rounds in each cache mode, and the seeds that once failed.

#include "cpp/engine/soak_harness.h"

namespace allspark::testing {
namespace {

TEST_P(SoakTest, EveryRequestGivesWhatItGivesAlone) {
  const std::unique_ptr<Soak> soak = MakeSoak(static_cast<uint64_t>(std::get<1>(GetParam())));
  soak->Start();
  for (int64_t round = 0; round < 2 && !HasFailure(); ++round) soak->Round(30, IsLockstep(round));
  // Only what must occur in so few requests; in the long form everything must occur.
  const SoakCoverage coverage = soak->Coverage();
  for (const char* what : {"end: length", "end: cancelled", "prefix hit"}) {
    EXPECT_GT(coverage.count(what), 0) << what;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Modes, SoakTest,
    ::testing::Values(std::make_tuple(proto::COMPUTE_FLOAT32, CacheMode::kDefault),
                      std::make_tuple(proto::COMPUTE_BFLOAT16, CacheMode::kQuantI8),
                      std::make_tuple(proto::COMPUTE_FLOAT32, CacheMode::kQuantU4)),
    ModeName);

}  // namespace
}  // namespace allspark::testing
