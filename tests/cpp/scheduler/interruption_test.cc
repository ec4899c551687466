// Sequences that are removed when blocks run out, instead of waiting for recomputation.

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "cpp/scheduler/harness.h"

namespace allspark {
namespace {

using State = ScheduledSequence::State;
using testing::Harness;
using testing::Step;
using testing::TestSequence;
using testing::ToString;

TEST(Interruption, TakesTheYoungestOfTheLowestPriority) {
  Harness harness(
      {.max_batch = 4, .chunk_tokens = 32, .block_size = 4, .num_blocks = 9, .interrupts = true});
  harness.Add(0, 4, 24);
  harness.Add(1, 4, 24);
  harness.Add(0, 4, 24);
  harness.Add(1, 4, 24);
  EXPECT_EQ(Step(harness), "1:0+4* 3:0+4* 0:0+4* 2:0+4*");
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(harness.Step());
  EXPECT_TRUE(harness.interrupted().empty());
  harness.Plan();
  EXPECT_EQ(ToString(harness.plan()), "1:8+1* 3:8+1* 0:8+1*");
  EXPECT_EQ(harness.interrupted(), (std::vector<int64_t>{2}));
  EXPECT_EQ(harness.scheduler().interrupted().size(), 1u);
  EXPECT_EQ(harness.scheduler().num_waiting(), 0);
  EXPECT_EQ(harness.scheduler().num_running(), 3);
  EXPECT_EQ(harness.scheduler().num_preemptions(), 0);
  ASSERT_TRUE(harness.Finish([](const TestSequence&) { return false; })) << harness.error();
  harness.Plan();
  EXPECT_TRUE(harness.scheduler().interrupted().empty()) << "of the last plan alone";
}

TEST(Interruption, TheLastInLineLeavesWhereItIsShortItself) {
  Harness harness(
      {.max_batch = 2, .chunk_tokens = 8, .block_size = 2, .num_blocks = 5, .interrupts = true});
  harness.Add(0, 2, 12);
  harness.Add(0, 2, 12);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(harness.Step());
  EXPECT_EQ(Step(harness), "0:4+1*");
  EXPECT_EQ(harness.sequences().size(), 1u);
  EXPECT_EQ(harness.scheduler().pool().num_free(), 2);
}

TEST(Interruption, LeavesItsFullBlocksToThoseWhoComeLater) {
  Harness harness({.max_batch = 2,
                   .chunk_tokens = 16,
                   .block_size = 2,
                   .num_blocks = 8,
                   .enable_prefix_cache = true,
                   .prefix_cache_ttl_us = 1000000,
                   .interrupts = true});
  TestSequence* older = harness.Add(0, {1, 2, 3}, 16);
  const TestSequence* younger = harness.Add(0, {7, 8, 9, 10, 11}, 16);
  std::vector<int32_t> tokens;
  while (harness.sequences().size() == 2) {
    tokens = younger->tokens;
    ASSERT_TRUE(harness.Step()) << harness.error();
  }
  // All its full blocks are still cached: the block that the older sequence took was not full.
  ASSERT_GE(tokens.size(), 7u);
  harness.Remove(older);
  harness.Add(0, tokens, 16);
  harness.Plan();
  ASSERT_EQ(harness.plan().size(), 1u);
  EXPECT_EQ(harness.plan()[0].begin, (static_cast<int64_t>(tokens.size()) - 1) / 2 * 2);
}

TEST(Interruption, BeamsLeaveTogether) {
  Harness harness(
      {.max_batch = 4, .chunk_tokens = 16, .block_size = 2, .num_blocks = 10, .interrupts = true});
  harness.Add(1, 2, 20);
  std::vector<int32_t> prompt(4);
  std::iota(prompt.begin(), prompt.end(), 0);
  harness.set_parents([](const TestSequence&) { return std::vector<int32_t>{0, 0, 0}; });
  harness.AddBeams(0, prompt, 20, 3);
  for (int i = 0; i < 40 && harness.sequences().size() == 2; ++i) {
    ASSERT_TRUE(harness.Step()) << harness.error();
  }
  ASSERT_EQ(harness.sequences().size(), 1u);
  EXPECT_EQ(harness.sequences()[0]->id, 0);
  EXPECT_EQ(harness.interrupted(), (std::vector<int64_t>{1}));
}

}  // namespace
}  // namespace allspark
