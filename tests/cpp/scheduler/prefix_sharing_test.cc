// The scheduler's use of the prefix cache, rule by rule (csrc/scheduler/README.md). script_test.cc
// has random scripts.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cpp/scheduler/harness.h"
#include "support/alloc_counter.h"

namespace allspark {
namespace {

using testing::Harness;
using testing::Step;
using testing::TestSequence;
using testing::ToString;
using Tokens = std::vector<int32_t>;

SchedulerConfig Config(int64_t num_blocks, int64_t chunk_tokens = 64) {
  return {.max_batch = 4,
          .chunk_tokens = chunk_tokens,
          .max_rows_beside_decodes = 2 * chunk_tokens,  // as many beside decodes
          .block_size = 4,
          .num_blocks = num_blocks,
          .enable_prefix_cache = true,
          .prefix_cache_ttl_us = 1000};
}

// begin, begin + 1, ...
Tokens Count(int64_t num_tokens, int32_t begin = 0) {
  Tokens tokens(static_cast<size_t>(num_tokens));
  for (int32_t& token : tokens) token = begin++;
  return tokens;
}

Tokens Join(Tokens tokens, const Tokens& more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokens;
}

TEST(PrefixSharing, ALaterSequenceTakesTheFullBlocksOfItsBeginning) {
  Harness harness(Config(16));
  harness.Remove([&] {
    TestSequence* first = harness.Add(0, Count(11), 20);
    EXPECT_EQ(Step(harness), "0:0+11*");
    return first;
  }());
  EXPECT_EQ(harness.scheduler().prefix_cache().num_unused(), 2);
  harness.Add(0, Join(Count(6), {99, 98, 97}), 20);
  EXPECT_EQ(Step(harness), "1:4+5*") << "one block of 4 is the same";
}

TEST(PrefixSharing, TheLastTokenIsAlwaysComputed) {
  Harness harness(Config(16));
  harness.Add(0, Count(8), 20);
  EXPECT_EQ(Step(harness), "0:0+8*");
  harness.Add(0, Count(8), 20);
  harness.Add(0, Count(9), 20);
  // Sequence 1 computed a block that existed already: both sequences use the older one.
  EXPECT_EQ(Step(harness), "0:8+1* 1:4+4* 2:8+1*");
  EXPECT_EQ(harness.sequences()[0]->block_table[1], harness.sequences()[1]->block_table[1]);
  EXPECT_EQ(harness.scheduler().prefix_cache().num_available(), 16 - 2 - 2);
}

TEST(PrefixSharing, OneStepComputesACommonBeginningOnce) {
  Harness harness(Config(32, 40));
  TestSequence* first = harness.Add(0, Count(22), 40);
  TestSequence* second = harness.Add(0, Join(Count(20), {90, 91}), 40);
  harness.Add(0, Join(Count(13), {92}), 40);
  EXPECT_EQ(Step(harness), "0:0+22* 1:20+2* 2:12+2*");
  EXPECT_EQ(second->block_table[4], first->block_table[4]);
  EXPECT_NE(second->block_table[5], first->block_table[5]) << "the last, partial block is its own";
  const int32_t shared = first->block_table[0];
  harness.Remove(first);
  EXPECT_EQ(harness.scheduler().pool().reference_count(shared), 2 + 1) << "two and the index";
  EXPECT_EQ(Step(harness), "1:22+1* 2:14+1*");
}

TEST(PrefixSharing, ALongBeginningIsComputedOnceOverManySteps) {
  Harness harness(Config(64, 8));
  harness.Add(0, Count(30), 40);
  harness.Add(0, Join(Count(28), {90, 91, 92}), 40);
  EXPECT_EQ(Step(harness), "0:0+8");
  EXPECT_EQ(Step(harness), "0:8+8");
  // A sequence of higher priority goes first; sequence 0 continues where that sequence stops.
  harness.Add(1, Join(Count(21), {93}), 40);
  EXPECT_EQ(Step(harness), "2:16+6* 0:20+2");
  EXPECT_EQ(Step(harness), "2:22+1* 0:22+8*");
  EXPECT_EQ(Step(harness), "2:23+1* 0:30+1* 1:28+3*");
}

TEST(PrefixSharing, SaltsKeepBlocksApart) {
  Harness harness(Config(32));
  harness.Add(0, Count(9), 20, /*salt=*/1);
  harness.Add(0, Count(9), 20, /*salt=*/2);
  harness.Add(0, Count(9), 20, /*salt=*/1);
  EXPECT_EQ(Step(harness), "0:0+9* 1:0+9* 2:8+1*");
}

TEST(PrefixSharing, AConversationGoesOnWhereItsAnswerEnded) {
  Harness harness(Config(32));
  TestSequence* turn = harness.Add(0, Count(6), 40);
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(harness.Step());
  const Tokens said = turn->tokens;
  ASSERT_EQ(said.size(), 14u);
  harness.Remove(turn);
  harness.Add(0, Join(said, Count(5, 500)), 40);
  EXPECT_EQ(Step(harness), "1:12+7*") << "13 of 14 tokens were computed, 12 fill blocks";
}

TEST(PrefixSharing, APreemptedSequenceFindsItsBlocks) {
  Harness harness(Config(6));
  TestSequence* first = harness.Add(0, Count(8), 20);
  TestSequence* second = harness.Add(0, Count(8, 100), 20);
  while (second->num_preemptions == 0) ASSERT_TRUE(harness.Step());
  EXPECT_EQ(second->num_tokens, 13);
  harness.Remove(first);
  // 12 tokens were computed, in three blocks; the first sequence took the last block.
  EXPECT_EQ(Step(harness), "1:8+5*");
}

TEST(PrefixSharing, SharedBlocksCostAdmissionNothing) {
  Harness harness(Config(8));
  harness.Add(0, Count(20), 24);
  EXPECT_EQ(Step(harness), "0:0+20*");  // Five blocks, and one to grow into.
  harness.Add(0, Join(Count(16), {90}), 24);
  EXPECT_EQ(Step(harness), "0:20+1* 1:16+1*") << "of its six blocks four are there";
  EXPECT_EQ(harness.scheduler().num_running(), 2);
  // Without shared blocks the second sequence must wait.
  Harness apart(Config(8));
  apart.Add(0, Count(20), 24);
  EXPECT_EQ(Step(apart), "0:0+20*");
  apart.Add(0, Count(17, 100), 24);
  EXPECT_EQ(Step(apart), "0:20+1*");
}

TEST(PrefixSharing, UnusedBlocksAreForgottenForThoseThatNeedThem) {
  Harness harness(Config(6));
  for (int32_t i = 0; i < 5; ++i) {
    TestSequence* sequence = harness.Add(0, Count(12, 100 * i), 16);
    EXPECT_EQ(Step(harness), std::to_string(i) + ":0+12*");
    harness.Remove(sequence);
  }
  EXPECT_EQ(harness.scheduler().prefix_cache().num_unused(), 6);
  EXPECT_EQ(harness.scheduler().num_preemptions(), 0);
  harness.Add(0, Join(Count(12, 400), {1}), 16);
  EXPECT_EQ(Step(harness), "5:12+1*");
  harness.Add(0, Join(Count(12, 300), {1}), 16);
  EXPECT_EQ(Step(harness), "5:13+1*") << "two of its blocks are left, and it needs four";
}

TEST(PrefixSharing, TimePassesByThePlans) {
  Harness harness(Config(16));
  harness.set_now(500);
  TestSequence* first = harness.Add(0, Count(9), 20);
  EXPECT_EQ(Step(harness), "0:0+9*");
  harness.Remove(first);
  harness.set_now(1499);
  TestSequence* second = harness.Add(0, Count(9), 20);
  EXPECT_EQ(Step(harness), "1:8+1*");
  harness.Remove(second);
  harness.set_now(2499);
  harness.Add(0, Count(9), 20);
  EXPECT_EQ(Step(harness), "2:0+9*");
}

TEST(PrefixSharing, WhatAFailedStepWasToFillIsNotThere) {
  Harness harness(Config(32));
  harness.Add(0, Count(9), 20);
  harness.Add(0, Count(9), 20);
  ASSERT_TRUE(harness.FailStep());
  EXPECT_TRUE(harness.sequences().empty());
  EXPECT_EQ(harness.scheduler().pool().num_free(), 32);
  harness.Add(0, Count(9), 20);
  EXPECT_EQ(Step(harness), "2:0+9*");
}

TEST(PrefixSharing, ASequenceThatIsNotInAStepTakesNothingOfIt) {
  Harness harness(Config(35, 8));
  TestSequence* last = harness.Add(0, Count(16), 17);
  EXPECT_EQ(Step(harness), "0:0+8");
  // A decode of higher priority takes more blocks than it was admitted with; a long prompt shares
  // the prefix.
  harness.Add(2, Count(3, 900), 60);
  harness.Add(1, Count(118), 119);
  for (int i = 0; i < 14; ++i) ASSERT_TRUE(harness.Step());
  harness.Plan();
  // The last sequence could share the second's third block, but there is no block for its other
  // tokens. The step fails.
  EXPECT_EQ(ToString(harness.plan()), "1:16+1* 2:117+1*");
  EXPECT_EQ(last->state, ScheduledSequence::State::kRunning);
  EXPECT_EQ(last->block_table.size(), 2u);
  EXPECT_EQ(last->num_computed, 8);
  ASSERT_TRUE(harness.FailStep());
  EXPECT_EQ(Step(harness), "0:12+4*");
}

TEST(PrefixSharing, AStepPlannedAgainComputesWhatWasNotComputed) {
  Harness harness(Config(32, 12));
  harness.Add(0, Count(9), 20);
  harness.Add(0, Count(9), 20);
  harness.Plan();
  EXPECT_EQ(ToString(harness.plan()), "0:0+9* 1:8+1*");
  harness.Add(1, Count(10, 50), 20);
  EXPECT_EQ(Step(harness), "2:0+10* 0:0+2") << "nothing of the step before counts";
  EXPECT_EQ(Step(harness), "2:10+1* 0:2+7* 1:8+1*");
}

TEST(PrefixSharing, RemovalBetweenPlanAndCommitLeavesWhatWasComputed) {
  Harness harness(Config(32));
  TestSequence* first = harness.Add(0, Count(9), 20);
  TestSequence* second = harness.Add(0, Join(Count(8), Count(5, 90)), 20);
  harness.Plan();
  EXPECT_EQ(ToString(harness.plan()), "0:0+9* 1:8+5*");
  const Tokens table = second->block_table;
  harness.scheduler().Remove(first);
  harness.scheduler().Commit();
  EXPECT_EQ(harness.scheduler().prefix_cache().FindAll(second->tokens, 0).num_blocks, 3);
  EXPECT_EQ(second->block_table, table);
}

TEST(PrefixSharing, WhoseOwnerWantsEveryTokenComputedTakesNothingAndGives) {
  Harness harness(Config(32));
  harness.Remove([&] {
    TestSequence* first = harness.Add(0, Count(13), 20);
    EXPECT_EQ(Step(harness), "0:0+13*");
    return first;
  }());
  TestSequence* all = harness.Add(0, Count(17), 20);
  all->max_cached = 0;
  harness.Add(0, Count(18), 24);
  EXPECT_EQ(Step(harness), "1:0+17* 2:12+6*");
  EXPECT_EQ(harness.scheduler().prefix_cache().num_available(), 32 - 4 - 2)
      << "they have the first one's blocks, and the fourth of one of them";
  EXPECT_EQ(Step(harness), "1:17+1* 2:18+1*");
}

TEST(PrefixSharing, ASequenceTakesNoMoreTokensThanItMay) {
  Harness harness(Config(32));
  harness.Remove([&] {
    TestSequence* first = harness.Add(0, Count(17), 20);
    EXPECT_EQ(Step(harness), "0:0+17*");
    return first;
  }());
  harness.Add(0, Count(17), 20)->max_cached = 11;
  harness.Add(0, Count(17), 20)->max_cached = 12;
  harness.Add(0, Count(17), 20)->max_cached = 3;
  EXPECT_EQ(Step(harness), "1:8+9* 2:12+5* 3:0+17*");
}

TEST(PrefixSharing, AcceptedDraftsFillBlocks) {
  SchedulerConfig config = Config(32);
  config.max_draft_rows = 16;
  Harness harness(config);
  TestSequence* sequence = harness.Add(0, Count(6), 40);
  harness.set_accept([](const PlannedChunk& chunk) { return chunk.num_drafts; });
  EXPECT_EQ(Step(harness), "0:0+6*");
  sequence->num_drafts = 5;
  EXPECT_EQ(Step(harness), "0:6+6*");
  EXPECT_EQ(sequence->num_computed, 12);
  const Tokens said = sequence->tokens;
  harness.Remove(sequence);
  harness.Add(0, said, 40);
  EXPECT_EQ(Step(harness), "1:12+1*");
}

TEST(PrefixSharing, PinnedBlocksAreThereForThoseWhoShareThemAlone) {
  SchedulerConfig config = Config(8);
  config.max_pinned_blocks = 4;
  Harness harness(config);
  harness.Remove([&] {
    TestSequence* first = harness.Add(0, Count(16), 20);
    EXPECT_EQ(Step(harness), "0:0+16*");
    return first;
  }());
  PrefixCache& cache = harness.scheduler().prefix_cache();
  ASSERT_EQ(*cache.Pin(Count(16), 0), 16);
  TestSequence* other = harness.Add(0, Count(17, 500), 20);
  harness.scheduler().Plan();
  EXPECT_EQ(other->state, ScheduledSequence::State::kWaiting) << "it needs five blocks of four";
  harness.Remove(other);
  TestSequence* sharer = harness.Add(0, Join(Count(16), {1, 2}), 20);
  harness.scheduler().Plan();
  EXPECT_EQ(sharer->block_table.size(), 5u);
  EXPECT_EQ(cache.num_available(), 3);
  harness.Remove(sharer);
  cache.Unpin(Count(16), 0);
  EXPECT_EQ(cache.num_available(), 8);
}

TEST(PrefixSharing, AllocatesNothingAfterConstruction) {
  SchedulerConfig config = Config(20, 8);
  config.block_size = 2;
  config.prefix_cache_ttl_us = 40;
  Scheduler scheduler(config);
  std::vector<TestSequence> sequences(40);
  for (size_t i = 0; i < sequences.size(); ++i) {
    TestSequence& s = sequences[i];
    s.priority = static_cast<int64_t>(i % 3);
    s.max_length = 20 + static_cast<int64_t>(i % 5);
    s.num_tokens = 1 + static_cast<int64_t>(i % 9);
    s.tokens = Count(s.max_length, static_cast<int32_t>(i % 4));
    s.token_ids = s.tokens.data();
    s.block_table.reserve(12);
  }
  testing::AllocationCounter counter;
  int64_t num_hits = 0;
  {
    testing::AllocationCounter::Scope scope(&counter);
    for (TestSequence& s : sequences) scheduler.Add(&s);
    for (int64_t now = 0; scheduler.num_running() + scheduler.num_waiting() > 0; ++now) {
      const std::vector<PlannedChunk>& plan = scheduler.Plan(now);
      for (const PlannedChunk& chunk : plan) num_hits += chunk.begin - chunk.sequence->num_computed;
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
  EXPECT_GT(num_hits, 100);
}

}  // namespace
}  // namespace allspark
