// The blocks of the KV cache, and the tokens that full blocks hold: a sequence with the same prefix
// as an earlier one takes its blocks instead of computing them again. Integers only, no memory, no
// device, and no clock of its own. README.md beside this file has the policy.
//
// A block is known by its tokens, the block in front of it (its parent) and a salt. It is found by
// a 128-bit hash of the chain, and compared before it is used, so that equal hashes of different
// tokens are harmless. An unused block stays in the index until the pool needs it or its time to
// live is over. Misuse throws InternalError. Not thread-safe: the step thread owns it. After
// construction nothing allocates memory but the messages of errors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "allspark/status.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/chain_index.h"
#include "kv_cache/host_tier.h"
#include "kv_cache/lru_list.h"

namespace allspark {

struct PrefixCacheOptions {
  int64_t num_blocks = 0;
  int64_t block_size = 32;
  bool enabled = false;  // false: a pool without an index; nothing is found or kept
  int64_t ttl_us = 0;    // how long an unused block stays
  int64_t max_pinned_blocks = 0;
  int64_t num_host_blocks = 0;        // of the second tier; 0: there is none
  uint64_t hash_mask = ~uint64_t{0};  // applied to both halves of a hash: tests make collisions
};

// One block between the device's pool and a slot of the host tier.
struct HostCopy {
  bool to_host = false;
  int32_t block = 0;
  int32_t slot = 0;
};

class PrefixCache {
 public:
  static constexpr int32_t kNone = BlockPool::kNone;

  // A chain of blocks that hold a prefix of some tokens.
  struct Match {
    int64_t num_blocks = 0;
    int64_t num_in_use = 0;  // of those, blocks in use: they take no available block
    int32_t last = kNone;
  };

  explicit PrefixCache(const PrefixCacheOptions& options);

  bool enabled() const { return options_.enabled; }
  const BlockPool& pool() const { return pool_; }
  // Blocks that Allocate can give: free ones, and those in the index that nobody uses.
  int64_t num_available() const { return pool_.num_free() + unused_.size(); }
  int64_t num_unused() const { return unused_.size(); }
  int64_t num_pinned() const { return num_pinned_; }

  // As BlockPool::Allocate. If no block is free, the least recently used one is evicted, to the
  // host tier if there is one. If very many are unused, some are evicted before the last free block
  // is taken, so that there are runs of free ones.
  // Requires: num_available() > 0.
  int32_t Allocate(int32_t after = kNone, bool grows = true);
  // Requires: the block is in use or in the index.
  void AddReference(int32_t block);
  // Requires: the caller holds a reference. The blocks of a chain are released last block first, so
  // that no block outlives its parent.
  void Release(int32_t block);

  // The block with these block_size tokens after `parent` (kNone: at the beginning), or kNone.
  int32_t Find(int32_t parent, uint64_t salt, const int32_t* tokens) const;
  // The longest chain that holds a prefix of `tokens`.
  Match FindAll(std::span<const int32_t> tokens, uint64_t salt) const;
  // Like Find, but in the host tier, for a block that Find does not have. Takes a block of the
  // pool, puts it into the index, and adds the copy to copies(); the caller has a reference to the
  // block. kNone if the tier does not have the block either, or none is available.
  int32_t Restore(int32_t parent, uint64_t salt, const int32_t* tokens);
  // How many blocks of the host tier continue the chain `match`, which is of the same tokens.
  int64_t CountOnHost(const Match& match, std::span<const int32_t> tokens, uint64_t salt);
  // The copies to make, in this order, before anything is computed.
  const std::vector<HostCopy>& copies() const { return copies_; }
  void ClearCopies() { copies_.clear(); }

  // Puts a block that the caller holds into the index. `filled` false: the running step fills it; a
  // second call says when it has. Returns the block that the index has for these tokens: this one,
  // or another one that was there before. kNone if it can have none, since `parent` is not in the
  // index or another block has this hash.
  int32_t Insert(int32_t block, int32_t parent, uint64_t salt, const int32_t* tokens, bool filled);
  // Takes a block that is not filled out of the index; leaves other blocks there.
  void Withdraw(int32_t block);
  // Whether anybody has a reference: a sequence or a pin.
  bool IsInUse(int32_t block) const;

  // Sets the current time and evicts the blocks that have been unused for the time to live.
  // Requires: time does not go back.
  void Advance(int64_t now_us);

  // Keeps the blocks that hold a prefix of `tokens` until they are unpinned as often as pinned;
  // returns how many tokens they hold. A pin beyond max_pinned_blocks is refused.
  Result<int64_t> Pin(std::span<const int32_t> tokens, uint64_t salt);
  // Undoes one Pin of these tokens, or else of the longest pinned prefix of them; returns its
  // length, 0 if none is pinned.
  int64_t Unpin(std::span<const int32_t> tokens, uint64_t salt);
  // Undoes all pins of chains with this salt.
  void UnpinAll(uint64_t salt);
  // Evicts every block that no sequence uses, pinned or not, and clears the host tier; returns how
  // many blocks of the pool were evicted.
  int64_t Clear();

 private:
  struct Entry {
    uint64_t salt = 0;
    int32_t parent = kNone;
    int32_t num_pins = 0;      // pins of chains that it is in
    int32_t num_pin_ends = 0;  // of those: that end with it
    bool indexed = false;
    bool filled = false;
  };

  Entry& At(int32_t block) { return entries_[static_cast<size_t>(block)]; }
  const Entry& At(int32_t block) const { return entries_[static_cast<size_t>(block)]; }
  int32_t* TokensOf(int32_t block) { return tokens_.data() + block * options_.block_size; }
  // The hash of the chain that ends with `parent`.
  ChainHash HashOf(int32_t parent) const;
  ChainHash HashOf(const ChainHash& before, uint64_t salt, const int32_t* tokens) const;
  bool Holds(int32_t block, int32_t parent, uint64_t salt, const int32_t* tokens) const;
  // Undoes one pin that ends with this block; returns the number of the chain's blocks.
  int64_t UnpinChain(int32_t end);
  void EraseFromIndex(int32_t block);
  // Evicts the oldest unused blocks for Allocate, where that is necessary or useful.
  void MakeRoom(int32_t after, bool grows);
  void Evict(int32_t block);

  const PrefixCacheOptions options_;
  BlockPool pool_;  // the index has a reference to each of its blocks
  std::vector<Entry> entries_;
  std::vector<int32_t> tokens_;  // block_size of each block
  ChainIndex index_;
  HostTier host_;
  std::vector<HostCopy> copies_;  // room for one out and one in of every block
  LruList unused_;
  int64_t num_pinned_ = 0;
  int64_t now_us_ = 0;
};

}  // namespace allspark
