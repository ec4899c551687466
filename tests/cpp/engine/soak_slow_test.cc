// The long form of the soak: rounds until the time is over and everything has occurred; thousands
// of requests.

#include <chrono>
#include <cstdio>
#include <random>

#include "cpp/engine/soak_harness.h"

namespace allspark::testing {
namespace {

// One engine for each of the four policies that a seed selects.
constexpr int64_t kNumSoaks = 4;
// If something has not occurred when the time is over, the soak continues, up to this many rounds.
// The rarest events occur once in one or two rounds.
constexpr int64_t kMostRounds = 60;

TEST_P(SoakTest, ForALongTime) {
  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> share(
      static_cast<double>(SoakSetting("ALLSPARK_SOAK_SECONDS", 100)) / kNumSoaks);
  // Random seeds each time; a failure names its seed.
  const uint64_t first_seed = std::random_device()() / 4 * 4;
  SoakCoverage coverage;
  int64_t num_requests = 0;
  for (int64_t i = 0; i < kNumSoaks && !HasFailure(); ++i) {
    const std::unique_ptr<Soak> soak = MakeSoak(first_seed + static_cast<uint64_t>(i));
    soak->Start();
    const auto begin = Clock::now();
    const auto goes_on = [&] {
      if (soak->num_rounds() < 2 || Clock::now() - begin < share) return true;
      if (i + 1 < kNumSoaks || soak->num_rounds() >= kMostRounds) return false;
      SoakCoverage so_far = coverage;
      so_far.Add(soak->Coverage());
      return !so_far.Missing().empty();
    };
    while (!HasFailure() && goes_on()) {
      soak->Round(60, IsLockstep(soak->num_rounds()));
      if (soak->num_rounds() == 6) soak->NoteHeap();
    }
    if (soak->num_rounds() > 6) soak->ExpectBoundedHeap();
    num_requests += 60 * soak->num_rounds();
    coverage.Add(soak->Coverage());
  }
  std::printf("%lld requests\n", static_cast<long long>(num_requests));
  coverage.Print();
  // With a given seed or in lockstep only, the run repeats an earlier one, so it need not cover
  // everything.
  if (SoakSetting("ALLSPARK_SOAK_SEED", -1) < 0 && !IsLockstepAlone()) {
    coverage.ExpectAll();
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, SoakTest,
                         ::testing::Combine(::testing::Values(proto::COMPUTE_FLOAT32,
                                                              proto::COMPUTE_BFLOAT16),
                                            ::testing::ValuesIn(kCacheModes)),
                         ModeName);

}  // namespace
}  // namespace allspark::testing
