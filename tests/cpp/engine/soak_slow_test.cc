// The soak in its long form: rounds until the time is over, thousands of requests.

#include <chrono>
#include <cstdio>
#include <random>

#include "cpp/engine/soak_harness.h"

namespace allspark::testing {
namespace {

TEST_P(SoakTest, ForALongTime) {
  // Another one each time; a failure says which.
  const std::unique_ptr<Soak> soak = MakeSoak(std::random_device()());
  soak->Start();
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::seconds(SoakSetting("ALLSPARK_SOAK_SECONDS", 100));
  int64_t num_rounds = 0;
  for (; (num_rounds < 2 || std::chrono::steady_clock::now() < end) && !HasFailure();
       ++num_rounds) {
    soak->Round(60, IsLockstep(num_rounds));
    if (num_rounds == 5) soak->NoteHeap();
  }
  soak->ExpectCoverage();
  if (num_rounds > 5) {
    soak->ExpectBoundedHeap();
    EXPECT_GT(soak->num_resumed(), 0);
  }
  std::printf("%lld requests, %lld resumed;", static_cast<long long>(60 * num_rounds),
              static_cast<long long>(soak->num_resumed()));
  for (FinishReason reason :
       {FinishReason::kStop, FinishReason::kLength, FinishReason::kCancelled,
        FinishReason::kInterrupted, FinishReason::kDeadline, FinishReason::kError}) {
    std::printf(" %lld sequences ended by %s", static_cast<long long>(soak->NumEnded(reason)),
                std::string(FinishReasonName(reason)).c_str());
  }
  std::printf("\n");
}

INSTANTIATE_TEST_SUITE_P(Modes, SoakTest,
                         ::testing::Combine(::testing::Values(proto::COMPUTE_FLOAT32,
                                                              proto::COMPUTE_BFLOAT16),
                                            ::testing::ValuesIn(kCacheModes)),
                         ModeName);

}  // namespace
}  // namespace allspark::testing
