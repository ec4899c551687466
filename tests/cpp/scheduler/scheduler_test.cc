// The policy, rule by rule (csrc/scheduler/README.md). script_test.cc has random scripts.

#include "scheduler/scheduler.h"

#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "cpp/scheduler/harness.h"
#include "support/alloc_counter.h"

namespace allspark {
namespace {

using State = ScheduledSequence::State;
using testing::Harness;
using testing::Step;
using testing::TestSequence;
using testing::ToString;

std::string Ids(const ScheduledSequence* sequence) {
  std::string text;
  for (; sequence != nullptr; sequence = sequence->next) text += std::to_string(sequence->id) + " ";
  return text;
}

TEST(Scheduler, NothingToDoIsAnEmptyPlan) {
  Harness harness({.num_blocks = 4});
  EXPECT_EQ(Step(harness), "");
  EXPECT_EQ(Step(harness), "");
}

TEST(Scheduler, PrefillIsChunkedAndOnlyTheLastChunkSamples) {
  Harness harness({.max_batch = 2, .chunk_tokens = 8, .block_size = 4, .num_blocks = 16});
  harness.Add(0, 19, 40);
  EXPECT_EQ(Step(harness), "0:0+8");
  EXPECT_EQ(Step(harness), "0:8+8");
  EXPECT_EQ(Step(harness), "0:16+3*");
  EXPECT_EQ(Step(harness), "0:19+1*");
  EXPECT_EQ(Step(harness), "0:20+1*");
}

TEST(Scheduler, HeldSequencesAreInNoPlanAndThenComputeTheirNewestTokenAgain) {
  Harness harness({.max_batch = 2, .chunk_tokens = 8, .block_size = 4, .num_blocks = 16});
  TestSequence* held = harness.Add(0, 5, 40);
  harness.Add(0, 3, 40);
  int holds = 0;
  harness.set_holds([&](const TestSequence& s) { return &s == held && holds-- > 0; });
  holds = 1;
  EXPECT_EQ(Step(harness), "0:0+5* 1:0+3*");
  EXPECT_EQ(Step(harness), "1:3+1*");
  EXPECT_EQ(Step(harness), "1:4+1*");
  held->held = false;
  EXPECT_EQ(Step(harness), "0:4+1* 1:5+1*");
  EXPECT_EQ(Step(harness), "0:5+1* 1:6+1*");
  EXPECT_EQ(Step(harness), "0:6+1* 1:7+1*");
  holds = 1;
  // The held token fills its block, which others may then share: the whole block is computed again.
  EXPECT_EQ(Step(harness), "0:7+1* 1:8+1*");
  EXPECT_EQ(Step(harness), "1:9+1*");
  held->held = false;
  EXPECT_EQ(Step(harness), "1:10+1* 0:4+4*");
  EXPECT_EQ(Step(harness), "0:8+1* 1:11+1*");
}

TEST(Scheduler, APreemptedSequenceIsHeldNoMore) {
  Harness harness({.max_batch = 2, .chunk_tokens = 8, .block_size = 4, .num_blocks = 4});
  harness.Add(0, 4, 16);
  TestSequence* held = harness.Add(0, 3, 8);
  int holds = 1;
  harness.set_holds([&](const TestSequence& s) { return &s == held && holds-- > 0; });
  EXPECT_EQ(Step(harness), "0:0+4* 1:0+3*");
  EXPECT_TRUE(held->held);
  for (int i = 4; i < 12; ++i) EXPECT_EQ(Step(harness), "0:" + std::to_string(i) + "+1*");
  EXPECT_TRUE(held->held);
  EXPECT_EQ(Step(harness), "0:12+1*");
  EXPECT_FALSE(held->held);
  EXPECT_EQ(held->num_preemptions, 1);
}

TEST(Scheduler, BlocksAreTakenAsTheyAreNeeded) {
  Harness harness({.max_batch = 1, .chunk_tokens = 8, .block_size = 4, .num_blocks = 16});
  TestSequence* sequence = harness.Add(0, 11, 40);
  Step(harness);
  EXPECT_EQ(sequence->block_table.size(), 2u);
  Step(harness);
  EXPECT_EQ(sequence->block_table.size(), 3u);
  Step(harness);  // Token 11: the last slot of the third block.
  EXPECT_EQ(sequence->block_table.size(), 3u);
  Step(harness);
  EXPECT_EQ(sequence->block_table.size(), 4u);
}

TEST(Scheduler, SequencesThatDoNotGrowBeginNoExtentWhileAnotherHasRoom) {
  Harness harness({.max_batch = 8, .chunk_tokens = 64, .block_size = 4, .num_blocks = 64});
  const TestSequence* growing[] = {harness.Add(0, 8, 40), harness.Add(0, 8, 40)};
  const TestSequence* scored[] = {harness.Add(0, 8, 10), harness.Add(0, 8, 12)};
  Step(harness);
  const auto extent = [](const TestSequence* s) { return s->block_table[0] / kMostExtentBlocks; };
  EXPECT_EQ(extent(growing[0]), 0);
  EXPECT_EQ(extent(growing[1]), 1);
  for (const TestSequence* s : scored) EXPECT_LE(extent(s), 1);
}

TEST(Scheduler, BudgetIsSharedInOrderAndDecodesDoNotPayForIt) {
  Harness harness({.max_batch = 4, .chunk_tokens = 10, .block_size = 4, .num_blocks = 64});
  harness.Add(0, 4, 40);
  harness.Add(0, 3, 40);
  EXPECT_EQ(Step(harness), "0:0+4* 1:0+3*");
  harness.Add(0, 12, 40);
  harness.Add(0, 12, 40);
  EXPECT_EQ(Step(harness), "0:4+1* 1:3+1* 2:0+10");
  EXPECT_EQ(Step(harness), "0:5+1* 1:4+1* 2:10+2* 3:0+8");
  EXPECT_EQ(Step(harness), "0:6+1* 1:5+1* 2:12+1* 3:8+4*");
}

TEST(Scheduler, ChunksAreSmallerBesideDecodes) {
  Harness harness({.max_batch = 4,
                   .chunk_tokens = 8,
                   .max_rows_beside_decodes = 4,
                   .block_size = 4,
                   .num_blocks = 64});
  harness.Add(0, 2, 40);
  harness.Add(0, 20, 40);
  EXPECT_EQ(Step(harness), "0:0+2* 1:0+6");
  EXPECT_EQ(Step(harness), "0:2+1* 1:6+3");
  EXPECT_EQ(Step(harness), "0:3+1* 1:9+3");
  harness.Remove(harness.sequences().front().get());
  EXPECT_EQ(Step(harness), "1:12+8*");
}

TEST(Scheduler, PrefillKeepsHalfOfTheRowsBesideManyDecodes) {
  Harness harness({.max_batch = 6,
                   .chunk_tokens = 16,
                   .max_rows_beside_decodes = 5,
                   .block_size = 4,
                   .num_blocks = 64});
  for (int i = 0; i < 4; ++i) harness.Add(0, 1, 40);
  harness.Add(0, 30, 40);
  EXPECT_EQ(Step(harness), "0:0+1* 1:0+1* 2:0+1* 3:0+1* 4:0+12");
  EXPECT_EQ(Step(harness), "0:1+1* 1:1+1* 2:1+1* 3:1+1* 4:12+3");
}

TEST(Scheduler, ChunksAreSmallerTheFurtherTheyAreIntoThePrompt) {
  Harness harness({.max_batch = 4,
                   .chunk_tokens = 32,
                   .max_rows_beside_decodes = 17,
                   .double_cost_depth = 16,
                   .block_size = 4,
                   .num_blocks = 128});
  harness.Add(0, 2, 40);
  harness.Add(0, 118, 200);
  EXPECT_EQ(Step(harness), "0:0+2* 1:0+30");  // nobody decodes yet
  EXPECT_EQ(Step(harness), "0:2+1* 1:30+5");  // 16 rows, a token costs 2.875
  EXPECT_EQ(Step(harness), "0:3+1* 1:35+5");
  harness.Add(0, 8, 40);
  // Four tokens that cost 3.5 leave two rows to the next in line.
  EXPECT_EQ(Step(harness), "0:4+1* 1:40+4 2:0+2");
  harness.Remove(harness.sequences().front().get());
  EXPECT_EQ(Step(harness), "1:44+32");  // nobody decodes: a token costs less than 4 rows
  EXPECT_EQ(Step(harness), "1:76+22");  // 5.75 rows, of which a fourth counts
  harness.Add(1, 1, 40);
  EXPECT_EQ(Step(harness), "3:0+1* 1:98+17");
  EXPECT_EQ(Step(harness), "3:1+1* 1:115+2");  // a token costs no more than 8 rows
  EXPECT_EQ(Step(harness), "3:2+1* 1:117+1* 2:2+6*");
}

TEST(Scheduler, ALongPromptLeavesHalfOfTheBudgetToShorterOnes) {
  Harness harness({.max_batch = 8,
                   .chunk_tokens = 8,
                   .long_prefill_tokens = 20,
                   .block_size = 4,
                   .num_blocks = 64});
  harness.Add(0, 60, 64);
  EXPECT_EQ(Step(harness), "0:0+8");  // nobody else is there
  harness.Add(0, 6, 40);
  EXPECT_EQ(Step(harness), "0:8+4 1:0+4");
  harness.Add(0, 3, 40);
  // Of those that wait, the first counts.
  EXPECT_EQ(Step(harness), "0:12+4 1:4+2* 2:0+2");
  harness.Add(0, 50, 64);  // another long one
  EXPECT_EQ(Step(harness), "1:6+1* 2:2+1* 0:16+8");
  EXPECT_EQ(Step(harness), "1:7+1* 2:3+1* 0:24+8");
  EXPECT_EQ(Step(harness), "1:8+1* 2:4+1* 0:32+8");
  harness.Remove(harness.sequences()[2].get());
  harness.Remove(harness.sequences()[1].get());
  EXPECT_EQ(Step(harness), "0:40+8");  // no longer a long one
  EXPECT_EQ(Step(harness), "0:48+8");
  EXPECT_EQ(Step(harness), "0:56+4* 3:0+4");
}

TEST(Scheduler, ASecondLongPromptLeavesAllThatShorterOnesNeed) {
  Harness harness({.max_batch = 8,
                   .chunk_tokens = 8,
                   .long_prefill_tokens = 20,
                   .block_size = 4,
                   .num_blocks = 64});
  harness.Add(0, 40, 64);
  EXPECT_EQ(Step(harness), "0:0+8");
  harness.Add(1, 40, 64);
  harness.Add(0, 9, 40);
  EXPECT_EQ(Step(harness), "1:0+4 2:0+4");
  EXPECT_EQ(Step(harness), "1:4+4 2:4+4");
  EXPECT_EQ(Step(harness), "2:8+1* 1:8+8");
}

TEST(Scheduler, DecodesWaitForPrefillsAFewStepsInARow) {
  Harness harness({.max_batch = 4,
                   .chunk_tokens = 8,
                   .max_rows_beside_decodes = 4,
                   .max_steps_without_decodes = 2,
                   .block_size = 4,
                   .num_blocks = 64});
  harness.Add(0, 2, 40);
  harness.Add(0, 40, 60);
  EXPECT_EQ(Step(harness), "0:0+2* 1:0+6");
  EXPECT_EQ(Step(harness), "1:6+8");
  EXPECT_EQ(Step(harness), "1:14+8");
  EXPECT_EQ(Step(harness), "0:2+1* 1:22+3");  // they have waited long enough
  EXPECT_EQ(Step(harness), "1:25+8");
  EXPECT_EQ(Step(harness), "1:33+7*");
  EXPECT_EQ(Step(harness), "0:3+1* 1:40+1*");  // nothing else to compute
  harness.Add(0, 9, 40);
  EXPECT_EQ(Step(harness), "2:0+8");
  harness.Remove(harness.sequences().back().get());
  EXPECT_EQ(Step(harness), "0:4+1* 1:41+1*");
}

TEST(Scheduler, NewcomerOfHigherPriorityIsServedBeforeALongPrefill) {
  Harness harness({.max_batch = 4, .chunk_tokens = 8, .block_size = 4, .num_blocks = 64});
  harness.Add(0, 100, 120);
  EXPECT_EQ(Step(harness), "0:0+8");
  harness.Add(5, 12, 40);
  harness.Add(0, 3, 40);
  EXPECT_EQ(Step(harness), "1:0+8");
  EXPECT_EQ(Step(harness), "1:8+4* 0:8+4");
  EXPECT_EQ(Step(harness), "1:12+1* 0:12+8");
}

TEST(Scheduler, MaxBatchBoundsWhatRuns) {
  Harness harness({.max_batch = 2, .chunk_tokens = 100, .block_size = 4, .num_blocks = 64});
  std::vector<TestSequence*> sequences;
  for (int i = 0; i < 4; ++i) sequences.push_back(harness.Add(0, 2, 20));
  EXPECT_EQ(Step(harness), "0:0+2* 1:0+2*");
  EXPECT_EQ(harness.scheduler().num_running(), 2);
  EXPECT_EQ(harness.scheduler().num_waiting(), 2);
  harness.Remove(sequences[0]);
  EXPECT_EQ(Step(harness), "1:2+1* 2:0+2*");
}

TEST(Scheduler, QueueIsByPriorityThenArrival) {
  Harness harness({.max_batch = 1, .chunk_tokens = 4, .block_size = 4, .num_blocks = 64});
  for (const int64_t priority : {0, 2, 1, 2, -1, 0, 1, 2}) harness.Add(priority, 1, 2);
  EXPECT_EQ(Ids(harness.scheduler().first_waiting()), "1 3 7 2 6 0 5 4 ");
  std::string order;
  for (int i = 0; i < 8; ++i) order += Step(harness) + " ";  // Each ends with its one step.
  EXPECT_EQ(order, "1:0+1* 3:0+1* 7:0+1* 2:0+1* 6:0+1* 0:0+1* 5:0+1* 4:0+1* ");
  EXPECT_TRUE(harness.sequences().empty());
}

TEST(Scheduler, SmallRequestDoesNotOvertakeALargeOne) {
  Harness harness({.max_batch = 4, .chunk_tokens = 16, .block_size = 4, .num_blocks = 6});
  TestSequence* first = harness.Add(0, 12, 24);
  EXPECT_EQ(Step(harness), "0:0+12*");
  harness.Add(0, 16, 20);  // Does not fit beside the first.
  harness.Add(0, 1, 4);    // Would fit, but it came later.
  harness.Add(-1, 1, 4);
  EXPECT_EQ(Step(harness), "0:12+1*");
  EXPECT_EQ(harness.scheduler().num_waiting(), 3);
  harness.Remove(first);
  EXPECT_EQ(Step(harness), "1:0+16*");
  EXPECT_EQ(Step(harness), "1:16+1* 2:0+1*");
  EXPECT_EQ(Ids(harness.scheduler().first_waiting()), "3 ");
}

TEST(Scheduler, AdmissionLeavesRoomToGrow) {
  Harness harness({.max_batch = 4, .chunk_tokens = 16, .block_size = 4, .num_blocks = 4});
  harness.Add(0, 4, 12);  // Two blocks with one to grow into.
  harness.Add(0, 4, 12);  // Two more: just fits.
  harness.Add(0, 1, 4);   // Needs only one block, but all blocks are promised.
  EXPECT_EQ(Step(harness), "0:0+4* 1:0+4*");
  EXPECT_EQ(harness.scheduler().num_waiting(), 1);
  EXPECT_EQ(harness.scheduler().pool().num_free(), 2);
}

TEST(Scheduler, BlocksPromisedToAPrefillAreNotPromisedTwice) {
  Harness harness({.max_batch = 4, .chunk_tokens = 8, .block_size = 4, .num_blocks = 8});
  harness.Add(0, 22, 24);  // Six blocks, taken two a step.
  EXPECT_EQ(Step(harness), "0:0+8");
  harness.Add(1, 6, 12);  // Needs three; six are free, four of them promised.
  EXPECT_EQ(Step(harness), "0:8+8");
  EXPECT_EQ(harness.scheduler().num_waiting(), 1);
}

TEST(Scheduler, PreemptsTheYoungestOfTheLowestPriority) {
  Harness harness({.max_batch = 4, .chunk_tokens = 32, .block_size = 4, .num_blocks = 9});
  TestSequence* old_low = harness.Add(0, 4, 24);
  harness.Add(1, 4, 24);
  TestSequence* young_low = harness.Add(0, 4, 24);
  harness.Add(1, 4, 24);
  EXPECT_EQ(Step(harness), "1:0+4* 3:0+4* 0:0+4* 2:0+4*");
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(harness.Step());
  // All need a third block, and one is free: the second in order preempts the last and takes its
  // blocks.
  EXPECT_EQ(Step(harness), "1:8+1* 3:8+1* 0:8+1*");
  EXPECT_EQ(young_low->state, State::kWaiting);
  EXPECT_EQ(young_low->num_preemptions, 1);
  EXPECT_EQ(young_low->num_computed, 0);
  EXPECT_TRUE(young_low->block_table.empty());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(harness.Step());
  EXPECT_EQ(Step(harness), "1:12+1* 3:12+1*");
  EXPECT_EQ(old_low->num_preemptions, 1);
  // It waits at its old place: before the younger sequence that was preempted earlier.
  EXPECT_EQ(Ids(harness.scheduler().first_waiting()), "0 2 ");
  EXPECT_EQ(Ids(harness.scheduler().first_running()), "1 3 ");
  EXPECT_EQ(harness.scheduler().num_preemptions(), 2);
}

TEST(Scheduler, YoungestPreemptsItself) {
  Harness harness({.max_batch = 2, .chunk_tokens = 8, .block_size = 2, .num_blocks = 5});
  harness.Add(0, 2, 12);
  TestSequence* younger = harness.Add(0, 2, 12);
  EXPECT_EQ(Step(harness), "0:0+2* 1:0+2*");
  EXPECT_EQ(Step(harness), "0:2+1* 1:2+1*");
  EXPECT_EQ(Step(harness), "0:3+1* 1:3+1*");
  EXPECT_EQ(Step(harness), "0:4+1*");  // With the last block.
  EXPECT_EQ(younger->state, State::kWaiting);
  EXPECT_EQ(younger->num_preemptions, 1);
  EXPECT_EQ(harness.scheduler().pool().num_free(), 2);
}

TEST(Scheduler, PreemptedSequenceIsRecomputedInChunksAndSamplesOnce) {
  Harness harness({.max_batch = 2, .chunk_tokens = 4, .block_size = 2, .num_blocks = 8});
  TestSequence* older = harness.Add(0, 2, 14);
  TestSequence* younger = harness.Add(0, 2, 14);
  while (younger->num_preemptions == 0) ASSERT_TRUE(harness.Step());
  const int64_t known = younger->num_tokens;
  EXPECT_GT(known, 6);
  EXPECT_EQ(harness.plan().size(), 1u);
  harness.Remove(older);
  EXPECT_EQ(Step(harness), "1:0+4");
  ASSERT_EQ(known, 9);
  EXPECT_EQ(Step(harness), "1:4+4");
  EXPECT_EQ(Step(harness), "1:8+1*");
  EXPECT_EQ(younger->num_tokens, 10);
}

TEST(Scheduler, PrefillPreemptsAPlannedDecodeWhichLeavesThePlan) {
  // A slow prefill of higher priority, and a decode that grows beyond the blocks it was admitted
  // with.
  Harness harness({.max_batch = 2, .chunk_tokens = 1, .block_size = 2, .num_blocks = 9});
  TestSequence* decode = harness.Add(0, 1, 18);
  EXPECT_EQ(Step(harness), "0:0+1*");
  harness.Add(1, 11, 12);
  EXPECT_EQ(Step(harness), "0:1+1* 1:0+1");
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(harness.Step());
  EXPECT_EQ(Step(harness), "0:8+1* 1:7+1");  // Five blocks and four: all.
  EXPECT_EQ(Step(harness), "1:8+1");         // The decode had its block and was planned.
  EXPECT_EQ(decode->num_preemptions, 1);
  EXPECT_EQ(decode->num_computed, 0);
  EXPECT_EQ(decode->num_tokens, 10);
}

TEST(Scheduler, PrefillLastInLineWaitsForBlocksAndKeepsItsOwn) {
  Harness harness({.max_batch = 2, .chunk_tokens = 1, .block_size = 2, .num_blocks = 9});
  TestSequence* decode = harness.Add(1, 1, 18);
  EXPECT_EQ(Step(harness), "0:0+1*");
  TestSequence* prefill = harness.Add(0, 11, 12);
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(harness.Step());
  EXPECT_EQ(Step(harness), "0:9+1*");  // The prefill has no room: four blocks, eight tokens.
  EXPECT_EQ(prefill->state, State::kRunning);
  EXPECT_EQ(prefill->num_computed, 8);
  EXPECT_EQ(Step(harness), "0:10+1*");  // Takes a block of the prefill's; another decode would too.
  EXPECT_EQ(prefill->num_preemptions, 1);
  harness.Remove(decode);
  EXPECT_EQ(Step(harness), "1:0+1");
}

TEST(Scheduler, SequenceThatOutgrowsThePoolIsNeverAdmittedAgain) {
  Harness harness({.max_batch = 2, .chunk_tokens = 8, .block_size = 2, .num_blocks = 2});
  TestSequence* large = harness.Add(0, 3, 100);
  TestSequence* next = harness.Add(0, 1, 4);
  EXPECT_EQ(Step(harness), "0:0+3*");
  EXPECT_EQ(Step(harness), "0:3+1*");
  EXPECT_EQ(Step(harness), "");  // Five tokens, room for four.
  EXPECT_EQ(harness.scheduler().num_running(), 0);
  EXPECT_EQ(harness.scheduler().first_waiting(), large);
  EXPECT_EQ(Step(harness), "");
  harness.Remove(large);  // As the engine does in this case.
  EXPECT_EQ(Step(harness), "1:0+1*");
  EXPECT_EQ(next->state, State::kRunning);
}

TEST(Scheduler, RunningDecodesAreInEveryStepOfALongPrefill) {
  Harness harness({.max_batch = 8, .chunk_tokens = 16, .block_size = 4, .num_blocks = 400});
  for (int i = 0; i < 4; ++i) harness.Add(0, 2, 300);
  Step(harness);
  harness.Add(7, 500, 600);
  for (int i = 0; i < 500 / 16; ++i) {
    ASSERT_TRUE(harness.Step());
    ASSERT_EQ(harness.plan().size(), 5u);
    for (size_t k = 0; k < 4; ++k) ASSERT_EQ(harness.plan()[k].num_tokens, 1);
    ASSERT_EQ(harness.plan()[4].num_tokens, 16);
  }
}

TEST(Scheduler, NobodyStarvesUnderAFloodOfSmallRequests) {
  Harness harness({.max_batch = 4, .chunk_tokens = 8, .block_size = 4, .num_blocks = 12});
  for (int i = 0; i < 6; ++i) harness.Add(0, 2, 6);
  const int64_t large = harness.Add(0, 36, 44)->id;
  int64_t steps = 0;
  const auto lives = [&] {
    return std::any_of(harness.sequences().begin(), harness.sequences().end(),
                       [&](const auto& s) { return s->id == large; });
  };
  for (; lives(); ++steps) {
    harness.Add(0, 2, 6);  // One more every step.
    ASSERT_TRUE(harness.Step()) << harness.error();
    ASSERT_LT(steps, 60);
  }
}

TEST(Scheduler, FirstTokensComeInOrderOfArrival) {
  Harness harness({.max_batch = 3, .chunk_tokens = 5, .block_size = 2, .num_blocks = 9});
  for (int i = 0; i < 20; ++i) harness.Add(0, 1 + i * 7 % 11, 14 + i % 5);
  std::vector<int64_t> first_begins;
  std::vector<bool> seen(20, false);
  while (!harness.sequences().empty()) {
    ASSERT_TRUE(harness.Step([&](const TestSequence& s) {
      if (!seen[static_cast<size_t>(s.id)]) first_begins.push_back(s.id);
      seen[static_cast<size_t>(s.id)] = true;
      return false;
    })) << harness.error();
  }
  EXPECT_EQ(first_begins.size(), 20u);
  EXPECT_TRUE(std::is_sorted(first_begins.begin(), first_begins.end()));
}

TEST(Scheduler, PoolOfOneLongestSequenceServesEverybody) {
  Harness harness({.max_batch = 4, .chunk_tokens = 3, .block_size = 2, .num_blocks = 8});
  for (int i = 0; i < 12; ++i) harness.Add(i % 3, 1 + i, 16);
  for (int steps = 0; !harness.sequences().empty(); ++steps) {
    ASSERT_TRUE(harness.Step()) << harness.error();
    ASSERT_FALSE(harness.plan().empty());
    ASSERT_LT(steps, 2000);
  }
}

TEST(Scheduler, PlanWithoutCommitIsPlannedAgain) {
  Harness harness({.max_batch = 2, .chunk_tokens = 8, .block_size = 4, .num_blocks = 16});
  harness.Add(0, 10, 20);
  harness.Plan();
  EXPECT_EQ(ToString(harness.plan()), "0:0+8");
  EXPECT_EQ(Step(harness), "0:0+8");
  EXPECT_EQ(harness.scheduler().pool().num_free(), 14);
}

TEST(Scheduler, RemovalBetweenPlanAndCommit) {
  Scheduler scheduler({.max_batch = 2, .chunk_tokens = 8, .block_size = 4, .num_blocks = 4});
  ScheduledSequence a, b;
  for (ScheduledSequence* s : {&a, &b}) {
    s->num_tokens = 3;
    s->max_length = 8;
    s->block_table.reserve(2);
    scheduler.Add(s);
  }
  EXPECT_EQ(scheduler.Plan().size(), 2u);
  scheduler.Remove(&a);
  scheduler.Commit();
  EXPECT_EQ(a.num_computed, 0);
  EXPECT_EQ(a.state, State::kNone);
  EXPECT_EQ(b.num_computed, 3);
  EXPECT_EQ(scheduler.pool().num_free(), 3);
  scheduler.Remove(&a);  // Again: nothing happens.
  scheduler.Remove(&b);
  EXPECT_EQ(scheduler.pool().num_free(), 4);
  EXPECT_EQ(scheduler.num_running() + scheduler.num_waiting(), 0);
}

TEST(Scheduler, DraftsLengthenDecodesWhereThereIsRoom) {
  Harness harness(
      {.max_batch = 4, .chunk_tokens = 8, .block_size = 4, .num_blocks = 16, .max_draft_rows = 6});
  TestSequence* first = harness.Add(0, 3, 40);
  TestSequence* second = harness.Add(0, 2, 40);
  EXPECT_EQ(Step(harness), "0:0+3* 1:0+2*");
  const auto plan = [&](int64_t first_drafts, int64_t second_drafts) {
    first->num_drafts = first_drafts;
    second->num_drafts = second_drafts;
    std::string text;
    auto& scheduler = const_cast<Scheduler&>(harness.scheduler());
    for (const PlannedChunk& chunk : scheduler.Plan()) {
      text += std::to_string(chunk.num_tokens) + "," + std::to_string(chunk.num_drafts) + " ";
    }
    return text;
  };
  EXPECT_EQ(plan(0, 0), "1,0 1,0 ");
  EXPECT_EQ(plan(2, 2), "3,2 3,2 ");
  EXPECT_EQ(plan(9, 2), "5,4 1,0 ") << "six rows in all";
  EXPECT_EQ(plan(1, 9), "2,1 4,3 ");
  EXPECT_EQ(second->num_drafts, 3) << "the owner sees what became of its nine";
  second->num_drafts = 2;
  const_cast<Scheduler&>(harness.scheduler()).TrimDrafts();
  // The tokens computed for drafts count only after the owner accepts them.
  auto& scheduler = const_cast<Scheduler&>(harness.scheduler());
  scheduler.Commit();
  EXPECT_EQ(second->num_computed, 3);
  scheduler.AcceptDraft(second);
  EXPECT_EQ(second->num_computed, 4);
  first->num_tokens += 1;
  second->num_tokens += 2;
  // Drafts with a higher acceptance rate come first.
  second->acceptance_rate = 0.7;
  first->acceptance_rate = 0.5;
  EXPECT_EQ(plan(9, 9), "2,1 4,3 ");
  // In a step with a prefill there are no drafts.
  harness.Add(0, 2, 8);
  EXPECT_EQ(plan(2, 2), "1,0 1,0 2,0 ");
}

TEST(Scheduler, MisuseThrows) {
  EXPECT_THROW(Scheduler({.max_batch = 0, .num_blocks = 1}), InternalError);
  EXPECT_THROW(Scheduler({.chunk_tokens = 0, .num_blocks = 1}), InternalError);
  EXPECT_THROW(Scheduler({.max_rows_beside_decodes = 0, .num_blocks = 1}), InternalError);
  EXPECT_THROW(Scheduler({.double_cost_depth = -1, .num_blocks = 1}), InternalError);
  EXPECT_THROW(Scheduler({.long_prefill_tokens = 0, .num_blocks = 1}), InternalError);
  EXPECT_THROW(Scheduler({.max_steps_without_decodes = -1, .num_blocks = 1}), InternalError);
  EXPECT_THROW(Scheduler({.block_size = 0, .num_blocks = 1}), InternalError);
  EXPECT_THROW(Scheduler({.num_blocks = 0}), InternalError);
  Scheduler scheduler({.max_batch = 2, .chunk_tokens = 8, .block_size = 4, .num_blocks = 4});
  EXPECT_THROW(scheduler.Commit(), InternalError);
  ScheduledSequence sequence;
  sequence.max_length = 8;
  sequence.block_table.reserve(2);
  EXPECT_THROW(scheduler.Add(&sequence), InternalError);  // No tokens.
  sequence.num_tokens = 9;
  EXPECT_THROW(scheduler.Add(&sequence), InternalError);
  sequence.num_tokens = 3;
  sequence.max_length = 12;
  EXPECT_THROW(scheduler.Add(&sequence), InternalError);  // Too small a block table.
  sequence.max_length = 8;
  scheduler.Add(&sequence);
  EXPECT_THROW(scheduler.Add(&sequence), InternalError);
  scheduler.Plan();
  scheduler.Commit();
  EXPECT_THROW(scheduler.Commit(), InternalError);
  EXPECT_THROW(scheduler.Plan(), InternalError);  // No token was appended.
  sequence.num_tokens = 9;
  EXPECT_THROW(scheduler.Plan(), InternalError);  // Beyond max_length.
  scheduler.Remove(&sequence);
  EXPECT_EQ(scheduler.pool().num_free(), 4);
}

TEST(Scheduler, AllocatesNothingAfterConstruction) {
  Scheduler scheduler({.max_batch = 6, .chunk_tokens = 8, .block_size = 2, .num_blocks = 20});
  std::deque<ScheduledSequence> sequences(40);
  for (size_t i = 0; i < sequences.size(); ++i) {
    ScheduledSequence& s = sequences[i];
    s.priority = static_cast<int64_t>(i % 3);
    s.num_tokens = 1 + static_cast<int64_t>(i % 9);
    s.max_length = 20 + static_cast<int64_t>(i % 5);
    s.block_table.reserve(12);
  }
  testing::AllocationCounter counter;
  {
    testing::AllocationCounter::Scope scope(&counter);
    for (ScheduledSequence& s : sequences) scheduler.Add(&s);
    while (scheduler.num_running() + scheduler.num_waiting() > 0) {
      const std::vector<PlannedChunk>& plan = scheduler.Plan();
      scheduler.Commit();
      for (const PlannedChunk& chunk : plan) {
        if (!chunk.samples) continue;
        if (++chunk.sequence->num_tokens >= chunk.sequence->max_length) {
          scheduler.Remove(chunk.sequence);
        }
      }
    }
  }
  EXPECT_EQ(counter.count(), 0);
  EXPECT_GT(scheduler.num_preemptions(), 0);
}

TEST(Scheduler, AFailedForkLeavesTheBlocksWithTheBeams) {
  Harness harness({.max_batch = 4,
                   .chunk_tokens = 16,
                   .block_size = 2,
                   .num_blocks = 32,
                   .enable_prefix_cache = true,
                   .prefix_cache_ttl_us = 100});
  harness.set_parents([](const TestSequence&) { return std::vector<int32_t>{0, 0, 0}; });
  TestSequence* search = harness.AddBeams(0, {1, 2, 3, 4, 5}, 20, 3);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(harness.Step()) << harness.error();
  harness.Plan();
  harness.scheduler().Commit();
  const std::vector<int32_t> parents{0, 1, 2};
  ScheduledSequence* const second = search->beams[1];
  const std::vector<int32_t> table = search->beams[0]->block_table;
  const int64_t num_computed = std::exchange(second->num_computed, second->num_computed - 1);
  EXPECT_THROW(harness.scheduler().Fork(search->beams, parents), InternalError);
  second->num_computed = num_computed;
  EXPECT_EQ(search->beams[0]->block_table, table);
  harness.Remove(search);
  const PrefixCache& cache = harness.scheduler().prefix_cache();
  EXPECT_EQ(cache.num_available(), 32) << "every block is free, or cached and unused";
  // The next search finds no table of the failed one among its own.
  harness.AddBeams(0, {6, 7, 8, 9}, 20, 3);
  while (!harness.sequences().empty()) ASSERT_TRUE(harness.Step()) << harness.error();
  EXPECT_EQ(cache.num_available(), 32);
}

double ThreadCpuSeconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// The number of waiting sequences must not slow a step. The test checks the ratio of two times on
// the processor, so that a loaded machine does not fail it.
TEST(Scheduler, TenThousandWaitingDoNotSlowAStep) {
  const auto seconds = [](int64_t num_waiting) {
    Scheduler scheduler({.max_batch = 8, .chunk_tokens = 64, .block_size = 4, .num_blocks = 48});
    std::deque<ScheduledSequence> sequences(static_cast<size_t>(num_waiting) + 8);
    for (ScheduledSequence& s : sequences) {
      s.num_tokens = 4;
      s.max_length = 40;
      s.block_table.reserve(10);
    }
    const double begin = ThreadCpuSeconds();
    for (ScheduledSequence& s : sequences) scheduler.Add(&s);
    for (int step = 0; step < 3000; ++step) {
      const std::vector<PlannedChunk>& plan = scheduler.Plan();
      scheduler.Commit();
      for (const PlannedChunk& chunk : plan) {
        if (chunk.samples && ++chunk.sequence->num_tokens == chunk.sequence->max_length) {
          ScheduledSequence* s = chunk.sequence;
          scheduler.Remove(s);
          s->num_tokens = 4;
          scheduler.Add(s);  // Behind all waiting sequences.
        }
      }
    }
    EXPECT_GT(scheduler.num_preemptions(), 100);
    return ThreadCpuSeconds() - begin;
  };
  double few = 1e9, many = 1e9;
  for (int repeat = 0; repeat < 3; ++repeat) {
    few = std::min(few, seconds(100));
    many = std::min(many, seconds(10000));
  }
  // Measured ratios are 2 to 3 (10,000 sequences are added, and they exceed the processor's
  // caches). A walk through the queue at each insertion would give a ratio above 50.
  EXPECT_LT(many, few * 20);
}

}  // namespace
}  // namespace allspark
