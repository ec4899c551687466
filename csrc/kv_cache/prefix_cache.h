// The blocks of the KV cache, and which tokens those hold that are full: a sequence that begins as
// another did takes its blocks instead of computing them again. Integers only, no memory, no
// device, and no clock of its own. README.md beside this file has the policy.
//
// A block is known by its tokens, the block in front of it (its parent) and a salt; it is found by
// a 128-bit hash of the chain, and compared before it is used, so that equal hashes of different
// tokens are harmless. A block that nobody uses stays in the index until the pool needs it or its
// time is over. Misuse throws InternalError. Not thread-safe: the step thread owns it. After
// construction nothing allocates memory but the messages of errors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "allspark/status.h"
#include "kv_cache/block_pool.h"

namespace allspark {

struct PrefixCacheOptions {
  int64_t num_blocks = 0;
  int64_t block_size = 32;
  bool enabled = false;  // false: a pool without an index; nothing is found or kept
  int64_t ttl_us = 0;    // how long a block stays that nobody uses
  int64_t max_pinned_blocks = 0;
  uint64_t hash_mask = ~uint64_t{0};  // applied to both halves of a hash: tests make collisions
};

class PrefixCache {
 public:
  static constexpr int32_t kNone = -1;  // no block

  // A chain of blocks that hold the beginning of some tokens.
  struct Match {
    int64_t num_blocks = 0;
    int64_t num_in_use = 0;  // of those: they cost nothing
    int32_t last = kNone;
  };

  explicit PrefixCache(const PrefixCacheOptions& options);

  bool enabled() const { return options_.enabled; }
  const BlockPool& pool() const { return pool_; }
  // Blocks that Allocate can give: free ones, and those in the index that nobody uses.
  int64_t num_available() const { return pool_.num_free() + num_unused_; }
  int64_t num_unused() const { return num_unused_; }
  int64_t num_pinned() const { return num_pinned_; }

  // As of the pool; if none is free, the block that has not been used for longest is forgotten.
  // Requires: num_available() > 0.
  int32_t Allocate();
  // Requires: the block is in use or in the index.
  void AddReference(int32_t block);
  // Requires: the caller holds a reference. Those of a chain are released last block first, so that
  // no block outlives the one in front of it.
  void Release(int32_t block);

  // The block with these block_size tokens after `parent` (kNone: at the beginning), or kNone.
  int32_t Find(int32_t parent, uint64_t salt, const int32_t* tokens) const;
  // The longest chain with the beginning of `tokens`.
  Match FindAll(std::span<const int32_t> tokens, uint64_t salt) const;
  // Puts a block that the caller holds into the index. `filled` false: the running step fills it;
  // a second call says when it has. Returns the block that is in the index for these tokens: this
  // one, or another one that was there before; kNone where there can be none, since `parent` is
  // not in the index or another block has this hash.
  int32_t Insert(int32_t block, int32_t parent, uint64_t salt, const int32_t* tokens, bool filled);
  // Takes a block out of the index that is not filled; others stay.
  void Withdraw(int32_t block);
  // Whether anybody has a reference: a sequence or a pin.
  bool IsInUse(int32_t block) const;

  // Sets the time of what follows and forgets the blocks that nobody has used for the time to live.
  // Requires: time does not go back.
  void Advance(int64_t now_us);

  // Keeps the blocks that hold the beginning of `tokens` until Unpin, as often as it was pinned;
  // returns how many tokens those are. A pin beyond max_pinned_blocks is refused.
  Result<int64_t> Pin(std::span<const int32_t> tokens, uint64_t salt);
  // Undoes one Pin of these tokens, or else of the longest beginning of them that is pinned;
  // returns its length, 0: none is.
  int64_t Unpin(std::span<const int32_t> tokens, uint64_t salt);
  // Forgets every block that no sequence uses, pinned or not; returns how many.
  int64_t Clear();

 private:
  struct Hash {
    uint64_t low = 0, high = 0;
    bool operator==(const Hash&) const = default;
  };
  struct Entry {
    Hash hash;
    uint64_t salt = 0;
    int64_t last_used_us = 0;  // while unused
    int32_t parent = kNone;
    int32_t older = kNone, newer = kNone;  // while unused
    int32_t num_pins = 0;                  // pins of chains that it is in
    int32_t num_pin_ends = 0;              // of those: that end with it
    bool indexed = false;
    bool filled = false;
  };

  Entry& At(int32_t block) { return entries_[static_cast<size_t>(block)]; }
  const Entry& At(int32_t block) const { return entries_[static_cast<size_t>(block)]; }
  int32_t* TokensOf(int32_t block) { return tokens_.data() + block * options_.block_size; }
  Hash HashOf(int32_t parent, uint64_t salt, const int32_t* tokens) const;
  bool Holds(int32_t block, int32_t parent, uint64_t salt, const int32_t* tokens) const;
  // The slot of the block with this hash, or the free one where it belongs.
  size_t SlotOf(const Hash& hash) const;
  void EraseFromIndex(int32_t block);
  void Evict(int32_t block);
  void AppendUnused(int32_t block);
  void EraseUnused(int32_t block);

  const PrefixCacheOptions options_;
  BlockPool pool_;  // the index has a reference to each of its blocks
  std::vector<Entry> entries_;
  std::vector<int32_t> tokens_;  // block_size of each block
  std::vector<int32_t> slots_;   // open addressing, linear probing; a power of two, half empty
  int32_t oldest_ = kNone, newest_ = kNone;
  int64_t num_unused_ = 0;
  int64_t num_pinned_ = 0;
  int64_t now_us_ = 0;
};

}  // namespace allspark
