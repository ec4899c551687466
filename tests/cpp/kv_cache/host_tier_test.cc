// The host tier alone, and under the index: after all copies, a block's content is that of its
// chain.

#include "kv_cache/host_tier.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "kv_cache/prefix_cache.h"

namespace allspark {
namespace {

using Tokens = std::vector<int32_t>;

ChainHash Hash(uint64_t low) { return {low, 7}; }

TEST(HostTier, KeepsTheNewestAndComparesThem) {
  HostTier tier(2, 2, 100);
  const Tokens a = {1, 1}, b = {2, 2}, c = {3, 3};
  const int32_t slot_a = tier.Put(Hash(1), 0, a.data());
  const int32_t slot_b = tier.Put(Hash(2), 0, b.data());
  EXPECT_NE(slot_a, HostTier::kNone);
  EXPECT_NE(slot_b, HostTier::kNone);
  EXPECT_NE(slot_a, slot_b);
  EXPECT_EQ(tier.Put(Hash(1), 0, a.data()), HostTier::kNone) << "it is there; and used now";
  EXPECT_EQ(tier.Put(Hash(3), 0, c.data()), slot_b);
  EXPECT_EQ(tier.Find(Hash(2), 0, b.data(), true), HostTier::kNone);
  EXPECT_EQ(tier.Find(Hash(1), 0, a.data(), true), slot_a);
  EXPECT_EQ(tier.Find(Hash(1), 5, a.data(), true), HostTier::kNone) << "another salt";
  EXPECT_EQ(tier.Find(Hash(1), 0, b.data(), true), HostTier::kNone) << "other tokens of this hash";
  EXPECT_EQ(tier.Put(Hash(1), 0, b.data()), HostTier::kNone) << "the hash is taken";
  EXPECT_EQ(tier.num_used(), 2);
  tier.Clear();
  EXPECT_EQ(tier.num_used(), 0);
  EXPECT_EQ(tier.Find(Hash(1), 0, a.data(), true), HostTier::kNone);
}

TEST(HostTier, ForgetsWhatWasNotUsedForTheTimeToLive) {
  HostTier tier(4, 2, 100);
  const Tokens a = {1, 1}, b = {2, 2};
  tier.Put(Hash(1), 0, a.data());
  tier.Put(Hash(2), 0, b.data());
  tier.Advance(60);
  EXPECT_NE(tier.Find(Hash(1), 0, a.data(), true), HostTier::kNone);
  EXPECT_NE(tier.Find(Hash(2), 0, b.data(), false), HostTier::kNone) << "no use";
  tier.Advance(100);
  EXPECT_NE(tier.Find(Hash(1), 0, a.data(), false), HostTier::kNone);
  EXPECT_EQ(tier.Find(Hash(2), 0, b.data(), false), HostTier::kNone);
  tier.Advance(160);
  EXPECT_EQ(tier.num_used(), 0);
}

TEST(HostTier, WithoutSlotsKeepsNothing) {
  HostTier tier(0, 2, 100);
  const Tokens a = {1, 1};
  EXPECT_EQ(tier.Put(Hash(1), 0, a.data()), HostTier::kNone);
  EXPECT_EQ(tier.Find(Hash(1), 0, a.data(), true), HostTier::kNone);
}

// A device and a host whose blocks hold the tokens that they were computed from.
class Memory {
 public:
  explicit Memory(const PrefixCacheOptions& options)
      : device_(static_cast<size_t>(options.num_blocks)),
        host_(static_cast<size_t>(options.num_host_blocks)) {}

  void Copy(PrefixCache& cache) {
    for (const HostCopy& copy : cache.copies()) {
      Tokens& block = device_[static_cast<size_t>(copy.block)];
      Tokens& slot = host_[static_cast<size_t>(copy.slot)];
      (copy.to_host ? slot : block) = copy.to_host ? block : slot;
      ++(copy.to_host ? num_out_ : num_in_);
    }
    cache.ClearCopies();
  }
  Tokens& At(int32_t block) { return device_[static_cast<size_t>(block)]; }
  int64_t num_out() const { return num_out_; }
  int64_t num_in() const { return num_in_; }

 private:
  std::vector<Tokens> device_, host_;
  int64_t num_out_ = 0, num_in_ = 0;
};

TEST(HostTier, BlocksComeBackWithWhatTheyHeld) {
  const PrefixCacheOptions options{
      .num_blocks = 12, .block_size = 2, .enabled = true, .ttl_us = 1000, .num_host_blocks = 9};
  PrefixCache cache(options);
  Memory memory(options);
  std::mt19937 random(4);
  int64_t restored = 0;
  for (int step = 0; step < 20000; ++step) {
    // Few prefixes, so that they repeat.
    Tokens tokens(2 * (1 + random() % 5));
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 2);
    const uint64_t salt = random() % 3;
    cache.Advance(step);
    const PrefixCache::Match match = cache.FindAll(tokens, salt);
    const int64_t expected = match.num_blocks + cache.CountOnHost(match, tokens, salt);
    Tokens table;
    int64_t found = 0;
    for (size_t i = 0; i < tokens.size(); i += 2) {
      const int32_t parent = table.empty() ? HostTier::kNone : table.back();
      int32_t block = cache.Find(parent, salt, &tokens[i]);
      const bool on_device = block != HostTier::kNone;
      if (on_device) {
        cache.AddReference(block);
      } else {
        block = cache.Restore(parent, salt, &tokens[i]);
        if (block != HostTier::kNone) ++restored;
      }
      if (block != HostTier::kNone && found == static_cast<int64_t>(i / 2)) ++found;
      const bool computes = block == HostTier::kNone;
      if (computes) {
        block = cache.Allocate();
        cache.Insert(block, parent, salt, &tokens[i], /*filled=*/true);
      }
      memory.Copy(cache);
      Tokens held(tokens.begin(), tokens.begin() + static_cast<int64_t>(i) + 2);
      held.push_back(static_cast<int32_t>(salt));
      if (computes) memory.At(block) = held;
      ASSERT_EQ(memory.At(block), held) << "step " << step << " block " << i / 2;
      table.push_back(block);
    }
    // Making room for one block may evict a later one from the tier.
    ASSERT_LE(found, expected);
    for (auto block = table.rbegin(); block != table.rend(); ++block) cache.Release(*block);
    if (random() % 500 == 0) cache.Clear();
  }
  EXPECT_GT(restored, 1000);
  EXPECT_EQ(memory.num_in(), restored);
  EXPECT_GT(memory.num_out(), 1000);
  EXPECT_EQ(cache.num_available(), 12);
}

}  // namespace
}  // namespace allspark
