// The counts of a profile, and its table.
#include "ops/op_profile.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

namespace allspark {
namespace {

constexpr int64_t kMs = 1000000;

void Wait(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

TEST(OpProfileTest, TimeWithinBelongsToTheInnerOperation) {
  OpProfile profile;
  const int64_t begin = SteadyNowNs();
  {
    OpTimer pass(&profile, Op::kPass);
    {
      OpTimer timer(&profile, Op::kGateUp);
      timer.Count(100, 2000);
      Wait(2);
      const OpTimer inner(&profile, Op::kQuantize);
      Wait(4);
    }
    const OpTimer second(&profile, Op::kGateUp);
    Wait(3);
  }
  const int64_t elapsed = SteadyNowNs() - begin;
  const OpTotals pass = profile.Of(Op::kPass), gate_up = profile.Of(Op::kGateUp);
  const OpTotals quantize = profile.Of(Op::kQuantize);
  EXPECT_EQ(pass.calls, 1);
  EXPECT_EQ(gate_up.calls, 2);
  EXPECT_EQ(quantize.calls, 1);
  EXPECT_GE(gate_up.ns, 5 * kMs);
  EXPECT_GE(quantize.ns, 4 * kMs);
  EXPECT_GE(pass.ns, 0);
  // Nothing is counted twice.
  EXPECT_LE(pass.ns + gate_up.ns + quantize.ns, elapsed);
  EXPECT_EQ(gate_up.bytes, 100);
  EXPECT_EQ(gate_up.operations, 2000);
  EXPECT_EQ(profile.Of(Op::kDown).calls, 0);
}

TEST(OpProfileTest, WithoutAProfileNothingIsMeasured) {
  OpTimer timer(nullptr, Op::kNorm);
  timer.Count(1, 1);
  EXPECT_FALSE(timer.is_on());
}

TEST(OpProfileTest, AnExceptionLeavesTheOuterOperationRunning) {
  OpProfile profile;
  const int64_t begin = SteadyNowNs();
  {
    OpTimer pass(&profile, Op::kPass);
    try {
      const OpTimer timer(&profile, Op::kNorm);
      throw 1;
    } catch (int) {
    }
    const OpTimer timer(&profile, Op::kRope);
    Wait(1);
  }
  const int64_t elapsed = SteadyNowNs() - begin;
  EXPECT_EQ(profile.Of(Op::kNorm).calls, 1);
  EXPECT_EQ(profile.Of(Op::kPass).calls, 1);
  EXPECT_GE(profile.Of(Op::kRope).ns, kMs);
  // Rope's time counts neither for the pass nor for the norm that threw.
  EXPECT_LE(profile.Of(Op::kPass).ns + profile.Of(Op::kNorm).ns, elapsed - kMs);
}

TEST(OpProfileTest, TheTableHasWhatRanTheLongestFirst) {
  OpProfile profile;
  profile.Add(Op::kPass, {3, 1 * kMs, 0, 0});
  profile.Add(Op::kDown, {70, 25 * kMs, 1'000'000'000, 123'456'789'000});
  profile.Add(Op::kAttention, {7, 70 * kMs, 7'000'000, 0});
  profile.Add(Op::kAttention, {70, 4 * kMs, 0, 0});
  EXPECT_EQ(ToText(profile, "model 'm'"),
            "model 'm': 3 forward passes, 0.100 s in operations\n"
            "operation               calls           ms   share     GB/s     Gop/s\n"
            "attention                  77       74.000  74.0 %      0.1         -\n"
            "down                       70       25.000  25.0 %     40.0    4938.3\n"
            "between operations          3        1.000   1.0 %        -         -\n");
}

TEST(OpProfileTest, AnEmptyTableIsTwoLines) {
  const std::string text = ToText(OpProfile(), "model 'm'");
  EXPECT_EQ(text.find("model 'm': 0 forward passes, 0.000 s in operations\noperation "), 0u);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2);
}

TEST(OpProfileTest, EveryOperationHasAName) {
  for (size_t i = 0; i < kNumOps; ++i) {
    for (size_t j = 0; j < i; ++j) {
      EXPECT_STRNE(OpName(static_cast<Op>(i)), OpName(static_cast<Op>(j)));
    }
  }
}

}  // namespace
}  // namespace allspark
