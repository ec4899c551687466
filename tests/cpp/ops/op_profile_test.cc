// What a profile counts, and the table of it.
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
  EXPECT_EQ(profile.Of(Op::kNorm).calls, 1);
  EXPECT_EQ(profile.Of(Op::kPass).calls, 1);
  EXPECT_LT(profile.Of(Op::kNorm).ns, profile.Of(Op::kRope).ns);
}

TEST(OpProfileTest, TheTableHasWhatRanTheLongestFirst) {
  OpProfile profile;
  {
    OpTimer pass(&profile, Op::kPass);
    for (int i = 0; i < 3; ++i) {
      OpTimer timer(&profile, Op::kDown);
      timer.Count(1 << 20, 1 << 22);
      Wait(1);
    }
    const OpTimer timer(&profile, Op::kAttention);
    Wait(10);
  }
  const std::string text = ToText(profile, "model 'm'");
  EXPECT_EQ(text.find("model 'm': 1 forward passes, 0.0"), 0u) << text;
  const size_t attention = text.find("\nattention "), down = text.find("\ndown "),
               rest = text.find("\nbetween operations ");
  EXPECT_LT(attention, down) << text;
  EXPECT_LT(down, rest) << text;
  EXPECT_NE(rest, std::string::npos) << text;
  EXPECT_EQ(text.find("\nnorm "), std::string::npos) << text;
  EXPECT_EQ(text.find("nan"), std::string::npos) << text;
  // Nothing is read between operations.
  EXPECT_EQ(text.substr(text.size() - 2), "-\n") << text;
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
