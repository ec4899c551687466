// The prefix cache's second tier: slots of host memory for blocks that a device's pool had no room
// for. Integers only: which slot holds which block; the owner does the copying. A block is found by
// the hash of its chain, and its tokens are compared. Nothing allocates after construction.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_cache/chain_index.h"
#include "kv_cache/lru_list.h"

namespace allspark {

class HostTier {
 public:
  static constexpr int32_t kNone = -1;

  // No slots: nothing is ever kept.
  HostTier(int64_t num_slots, int64_t block_size, int64_t ttl_us);

  int64_t num_used() const { return order_.size(); }

  // Assigns a slot to a block and returns it: a free one, or else the one unused for longest. The
  // block is to be copied there. kNone if the block has a slot already, or cannot have one.
  int32_t Put(const ChainHash& hash, uint64_t salt, const int32_t* tokens);
  // The slot that holds the block, or kNone. Counts as a use where `use`.
  int32_t Find(const ChainHash& hash, uint64_t salt, const int32_t* tokens, bool use);
  // As PrefixCache::Advance.
  void Advance(int64_t now_us);
  void Clear();

 private:
  const int32_t* TokensOf(int32_t slot) const { return tokens_.data() + slot * block_size_; }
  void Forget(int32_t slot);

  const int64_t block_size_;
  const int64_t ttl_us_;
  ChainIndex index_;
  std::vector<uint64_t> salts_;  // by slot
  std::vector<int32_t> tokens_;  // block_size of each slot
  std::vector<int32_t> free_;
  LruList order_;  // of the slots in use
  int64_t now_us_ = 0;
};

}  // namespace allspark
