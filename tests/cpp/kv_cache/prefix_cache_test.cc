// The index alone: chains, salts, collisions, the order of eviction, pins. tests/cpp/scheduler
// tests its use by the scheduler.

#include "kv_cache/prefix_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <vector>

#include "base/check.h"
#include "support/alloc_counter.h"

namespace allspark {
namespace {

using Tokens = std::vector<int32_t>;

PrefixCacheOptions Options(int64_t num_blocks) {
  return {.num_blocks = num_blocks, .block_size = 2, .enabled = true, .ttl_us = 100};
}

// Acts as a running sequence that computes `tokens`: takes the cached blocks and makes the others.
Tokens Use(PrefixCache& cache, const Tokens& tokens, uint64_t salt = 0) {
  Tokens table;
  for (size_t i = 0; i + 2 <= tokens.size(); i += 2) {
    const int32_t parent = table.empty() ? PrefixCache::kNone : table.back();
    int32_t block = cache.Find(parent, salt, &tokens[i]);
    if (block != PrefixCache::kNone) {
      cache.AddReference(block);
    } else {
      block = cache.Allocate(parent);
      cache.Insert(block, parent, salt, &tokens[i], /*filled=*/true);
    }
    table.push_back(block);
  }
  return table;
}

void End(PrefixCache& cache, const Tokens& table) {
  for (auto block = table.rbegin(); block != table.rend(); ++block) cache.Release(*block);
}

int64_t NumFound(const PrefixCache& cache, const Tokens& tokens, uint64_t salt = 0) {
  return cache.FindAll(tokens, salt).num_blocks;
}

TEST(PrefixCache, FindsTheLongestChainAndNothingElse) {
  PrefixCache cache(Options(8));
  const Tokens table = Use(cache, {1, 2, 3, 4, 5, 6});
  EXPECT_EQ(NumFound(cache, {1, 2, 3, 4, 5, 6}), 3);
  EXPECT_EQ(NumFound(cache, {1, 2, 3, 4, 5}), 2) << "full blocks alone";
  EXPECT_EQ(NumFound(cache, {1, 2, 9, 4, 5, 6}), 1);
  EXPECT_EQ(NumFound(cache, {3, 4}), 0) << "the same tokens elsewhere";
  EXPECT_EQ(NumFound(cache, {1, 2, 5, 6}), 1);
  EXPECT_EQ(NumFound(cache, {1, 2}, 7), 0) << "another salt";
  EXPECT_EQ(NumFound(cache, {}), 0);
  EXPECT_EQ(cache.FindAll(Tokens{1, 2, 3, 4}, 0).last, table[1]);
  EXPECT_EQ(cache.FindAll(Tokens{1, 2, 3, 4}, 0).num_in_use, 2);
  End(cache, table);
  EXPECT_EQ(cache.FindAll(Tokens{1, 2, 3, 4}, 0).num_in_use, 0);
  EXPECT_EQ(NumFound(cache, {1, 2, 3, 4, 5, 6}), 3) << "kept after its end";
  EXPECT_EQ(cache.num_available(), 8);
  EXPECT_EQ(cache.num_unused(), 3);
  EXPECT_EQ(Use(cache, {1, 2, 3, 4, 7, 8})[1], table[1]);
}

TEST(PrefixCache, WhatIsUnusedForLongestIsForgottenFirstAndEndsBeforeBeginnings) {
  PrefixCache cache(Options(5));
  End(cache, Use(cache, {1, 1, 2, 2, 3, 3}));
  End(cache, Use(cache, {4, 4, 5, 5}));
  End(cache, Use(cache, {1, 1}));  // Its first block is the newest now.
  const auto found = [&] {
    return std::make_pair(NumFound(cache, {1, 1, 2, 2, 3, 3}), NumFound(cache, {4, 4, 5, 5}));
  };
  EXPECT_EQ(found(), std::make_pair(int64_t{3}, int64_t{2}));
  Tokens taken = {cache.Allocate()};
  EXPECT_EQ(found(), std::make_pair(int64_t{2}, int64_t{2}));
  taken.push_back(cache.Allocate());
  EXPECT_EQ(found(), std::make_pair(int64_t{1}, int64_t{2}));
  taken.push_back(cache.Allocate());
  EXPECT_EQ(found(), std::make_pair(int64_t{1}, int64_t{1}));
  taken.push_back(cache.Allocate());
  EXPECT_EQ(found(), std::make_pair(int64_t{1}, int64_t{0}));
  End(cache, taken);
  EXPECT_EQ(cache.pool().num_free(), 4) << "blocks without known tokens are free at once";
}

// If sequences only come and go, evictions make room for runs of contiguous blocks.
TEST(PrefixCache, NewSequencesInAFullPoolHaveNeighbours) {
  PrefixCache cache(Options(1024));
  std::mt19937 random(5);
  int64_t num_blocks = 0, num_neighbours = 0;
  std::list<Tokens> running;
  for (int i = 0; i < 400; ++i) {
    Tokens tokens(20 + random() % 120);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 100000);
    running.push_back(Use(cache, tokens));
    const Tokens& table = running.back();
    for (size_t b = 1; b < table.size() && i >= 100; ++b) {
      ++num_blocks;
      // The last block of an extent has no next block.
      num_neighbours += table[b] == table[b - 1] + 1 || table[b] % 16 == 0;
    }
    if (running.size() <= 8) continue;
    End(cache, running.front());
    running.pop_front();
  }
  EXPECT_GE(cache.num_unused(), 1024 - 9 * 70 - 1024 / 32 - 16) << "few are forgotten early";
  EXPECT_GT(num_neighbours * 10, num_blocks * 8) << num_neighbours << " of " << num_blocks;
}

TEST(PrefixCache, TimeToLiveIsCountedFromTheLastUse) {
  PrefixCache cache(Options(8));
  cache.Advance(1000);
  const Tokens table = Use(cache, {1, 1, 2, 2});
  cache.Advance(5000);
  EXPECT_EQ(NumFound(cache, {1, 1, 2, 2}), 2) << "in use";
  End(cache, table);
  cache.Advance(5050);
  End(cache, Use(cache, {1, 1}));
  cache.Advance(5099);
  EXPECT_EQ(NumFound(cache, {1, 1, 2, 2}), 2);
  cache.Advance(5100);
  EXPECT_EQ(NumFound(cache, {1, 1, 2, 2}), 1);
  cache.Advance(5150);
  EXPECT_EQ(NumFound(cache, {1, 1, 2, 2}), 0);
  EXPECT_EQ(cache.pool().num_free(), 8);
}

TEST(PrefixCache, WhatIsNotFilledCanBeFoundAndWithdrawn) {
  PrefixCache cache(Options(4));
  const Tokens tokens = {1, 1, 2, 2};
  const int32_t first = cache.Allocate();
  EXPECT_EQ(cache.Insert(first, PrefixCache::kNone, 0, &tokens[0], false), first);
  const int32_t second = cache.Allocate();
  EXPECT_EQ(cache.Insert(second, first, 0, &tokens[2], false), second);
  EXPECT_EQ(NumFound(cache, tokens), 2);
  EXPECT_EQ(cache.Insert(first, PrefixCache::kNone, 0, &tokens[0], true), first);  // Filled.
  cache.Withdraw(first);  // So nothing happens.
  cache.Withdraw(second);
  EXPECT_EQ(NumFound(cache, tokens), 1);
  cache.Release(second);
  cache.Release(first);
  EXPECT_EQ(cache.pool().num_free(), 3);
  EXPECT_EQ(cache.num_available(), 4);
}

TEST(PrefixCache, OneBlockStandsForTheSameTokens) {
  PrefixCache cache(Options(4));
  const Tokens tokens = {1, 1, 2, 2};
  const Tokens table = Use(cache, tokens);
  const int32_t twin = cache.Allocate();
  EXPECT_EQ(cache.Insert(twin, PrefixCache::kNone, 0, &tokens[0], true), table[0]);
  EXPECT_EQ(cache.Insert(twin, PrefixCache::kNone, 1, &tokens[0], true), twin) << "another salt";
  const int32_t stray = cache.Allocate();
  EXPECT_EQ(cache.Insert(stray, PrefixCache::kNone, 0, &tokens[2], true), stray);
  cache.Release(stray);
  cache.Release(twin);
  End(cache, table);
  EXPECT_EQ(cache.num_unused(), 4);
}

TEST(PrefixCache, NothingFollowsABlockThatIsNotKnown) {
  PrefixCache cache(Options(4));
  const Tokens tokens = {1, 1};
  const int32_t parent = cache.Allocate();
  const int32_t block = cache.Allocate();
  EXPECT_EQ(cache.Insert(block, parent, 0, tokens.data(), true), PrefixCache::kNone);
  EXPECT_EQ(cache.Find(parent, 0, tokens.data()), PrefixCache::kNone);
}

TEST(PrefixCache, DisabledItIsAPool) {
  PrefixCacheOptions options = Options(2);
  options.enabled = false;
  PrefixCache cache(options);
  const Tokens table = Use(cache, {1, 1, 2, 2});
  EXPECT_EQ(NumFound(cache, {1, 1, 2, 2}), 0);
  EXPECT_EQ(cache.num_available(), 0);
  EXPECT_THROW(cache.Allocate(), InternalError);
  End(cache, table);
  EXPECT_EQ(cache.pool().num_free(), 2);
}

TEST(PrefixCache, PinnedBlocksStay) {
  PrefixCacheOptions options = Options(8);
  options.max_pinned_blocks = 3;
  PrefixCache cache(options);
  End(cache, Use(cache, {1, 1, 2, 2}));
  EXPECT_EQ(*cache.Pin(Tokens{9, 9}, 0), 0);
  EXPECT_EQ(*cache.Pin(Tokens{1, 1, 2, 2, 3, 3}, 0), 4);
  EXPECT_EQ(*cache.Pin(Tokens{1, 1}, 0), 2);
  EXPECT_EQ(cache.num_pinned(), 2);
  EXPECT_EQ(cache.num_available(), 6);
  cache.Advance(1000000);
  Tokens taken;
  while (cache.num_available() > 2) taken.push_back(cache.Allocate());
  EXPECT_EQ(NumFound(cache, {1, 1, 2, 2}), 2);
  End(cache, Use(cache, {5, 5, 6, 6}));
  const Status refused = cache.Pin(Tokens{5, 5, 6, 6}, 0).status();
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("2 blocks are pinned and 2 more are asked for; at most 3"),
            std::string::npos)
      << refused.message();
  // Pins are removed one by one: each ends at the block where it was set to end.
  EXPECT_EQ(cache.Unpin(Tokens{1, 1, 2, 2, 3, 3}, 0), 4);
  EXPECT_EQ(cache.num_pinned(), 1);
  EXPECT_EQ(cache.Unpin(Tokens{1, 1, 2, 2, 3, 3}, 0), 2);
  EXPECT_EQ(cache.Unpin(Tokens{1, 1, 2, 2, 3, 3}, 0), 0);
  EXPECT_EQ(cache.num_available(), 4);
  EXPECT_EQ(*cache.Pin(Tokens{5, 5, 6, 6}, 0), 4);
  EXPECT_EQ(cache.Unpin(Tokens{5, 5}, 0), 0) << "that pin ends elsewhere";
  const Tokens in_use = Use(cache, {5, 5});
  EXPECT_EQ(cache.Clear(), 3) << "1 1, 2 2 and the pinned 6 6";
  EXPECT_EQ(cache.num_pinned(), 0);
  EXPECT_EQ(NumFound(cache, {5, 5, 6, 6}), 1);
  End(cache, in_use);
  End(cache, taken);
  cache.Clear();
  EXPECT_EQ(cache.pool().num_free(), 8);
}

TEST(PrefixCache, AllPinsOfASaltAreUndone) {
  PrefixCacheOptions options = Options(8);
  options.max_pinned_blocks = 6;
  PrefixCache cache(options);
  for (const uint64_t salt : {1, 2}) {
    End(cache, Use(cache, {1, 1, 2, 2}, salt));
    EXPECT_EQ(*cache.Pin(Tokens{1, 1, 2, 2}, salt), 4);
    EXPECT_EQ(*cache.Pin(Tokens{1, 1}, salt), 2);
    EXPECT_EQ(*cache.Pin(Tokens{1, 1}, salt), 2);
  }
  cache.UnpinAll(1);
  EXPECT_EQ(cache.num_pinned(), 2);
  EXPECT_EQ(cache.num_available(), 6);
  EXPECT_EQ(cache.Unpin(Tokens{1, 1, 2, 2}, 1), 0);
  EXPECT_EQ(cache.Unpin(Tokens{1, 1, 2, 2}, 2), 4) << "those of others stay";
  cache.UnpinAll(2);
  EXPECT_EQ(cache.num_pinned(), 0);
  cache.Clear();
  EXPECT_EQ(cache.pool().num_free(), 8);
}

TEST(PrefixCache, MisuseThrows) {
  PrefixCache cache(Options(2));
  const Tokens tokens = {1, 1};
  EXPECT_THROW(cache.Release(0), InternalError);
  EXPECT_THROW(cache.Insert(0, PrefixCache::kNone, 0, tokens.data(), true), InternalError);
  EXPECT_THROW(cache.AddReference(0), InternalError);
  const Tokens table = Use(cache, tokens);
  End(cache, table);
  EXPECT_THROW(cache.Release(table[0]), InternalError) << "only the index has it";
  cache.Advance(5);
  EXPECT_THROW(cache.Advance(4), InternalError);
  const int32_t block = cache.Allocate();
  cache.Insert(block, PrefixCache::kNone, 3, tokens.data(), false);
  EXPECT_THROW(cache.Release(block), InternalError) << "left before it was filled";
}

// Random chains against maps, with 64 + 64-bit hashes and with hashes that nearly all collide. With
// collisions fewer blocks are found, but never a wrong one.
void RunRandom(uint64_t hash_mask, bool exact) {
  PrefixCacheOptions options = Options(24);
  options.hash_mask = hash_mask;
  PrefixCache cache(options);
  std::mt19937 random(5);
  std::map<int32_t, Tokens> contents;  // for each block ever indexed: all tokens up to its end
  std::list<std::pair<Tokens, Tokens>> live;
  testing::AllocationCounter counter;
  int64_t num_found = 0, num_missed = 0;
  for (int round = 0; round < 20000; ++round) {
    if (live.size() < 4) {
      Tokens tokens(2 * (1 + random() % 5));
      for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 2);
      Tokens table;
      table.reserve(tokens.size());
      for (size_t i = 0; i < tokens.size(); i += 2) {
        const Tokens beginning(tokens.begin(), tokens.begin() + static_cast<int64_t>(i) + 2);
        const int32_t parent = table.empty() ? PrefixCache::kNone : table.back();
        testing::AllocationCounter::Scope scope(&counter);
        int32_t block = cache.Find(parent, 0, &tokens[i]);
        if (block != PrefixCache::kNone) {
          ASSERT_EQ(contents[block], beginning);
          cache.AddReference(block);
          ++num_found;
        } else {
          block = cache.Allocate();
          const int32_t known = cache.Insert(block, parent, 0, &tokens[i], true);
          if (exact) {
            ASSERT_EQ(known, block);
          }
          num_missed += known == PrefixCache::kNone;
        }
        table.push_back(block);
      }
      for (size_t i = 0; i < table.size(); ++i) {
        contents[table[i]] =
            Tokens(tokens.begin(), tokens.begin() + 2 * static_cast<int64_t>(i) + 2);
      }
      live.emplace_back(tokens, table);
    } else {
      auto ended = std::next(live.begin(), static_cast<int64_t>(random() % live.size()));
      End(cache, ended->second);
      live.erase(ended);
    }
    if (random() % 50 == 0) cache.Advance(round);
    std::vector<bool> used(24);
    for (const auto& [tokens, table] : live) {
      for (const int32_t block : table) used[static_cast<size_t>(block)] = true;
    }
    ASSERT_EQ(cache.num_available(), std::count(used.begin(), used.end(), false));
  }
  EXPECT_EQ(counter.count(), 0);
  EXPECT_GT(num_found, exact ? 10000 : 1000);
  EXPECT_EQ(num_missed > 0, !exact);
  for (const auto& [tokens, table] : live) End(cache, table);
  cache.Clear();
  EXPECT_EQ(cache.pool().num_free(), 24);
}

TEST(PrefixCache, RandomChainsAreFoundAndAllocateNothing) { RunRandom(~uint64_t{0}, true); }
TEST(PrefixCache, CollisionsAreHarmless) { RunRandom(7, false); }

}  // namespace
}  // namespace allspark
