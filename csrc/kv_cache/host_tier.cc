#include "kv_cache/host_tier.h"

#include <algorithm>

namespace allspark {

HostTier::HostTier(int64_t num_slots, int64_t block_size, int64_t ttl_us)
    : block_size_(block_size),
      ttl_us_(ttl_us),
      index_(num_slots),
      salts_(static_cast<size_t>(num_slots)),
      tokens_(static_cast<size_t>(num_slots * block_size)),
      order_(num_slots) {
  for (int64_t slot = num_slots - 1; slot >= 0; --slot) {
    free_.push_back(static_cast<int32_t>(slot));
  }
}

void HostTier::Forget(int32_t slot) {
  index_.Erase(slot);
  order_.Erase(slot);
  free_.push_back(slot);
}

int32_t HostTier::Find(const ChainHash& hash, uint64_t salt, const int32_t* tokens, bool use) {
  const int32_t slot = index_.Find(hash);
  if (slot == kNone || salts_[static_cast<size_t>(slot)] != salt ||
      !std::equal(tokens, tokens + block_size_, TokensOf(slot))) {
    return kNone;
  }
  if (use) {
    order_.Erase(slot);
    order_.Append(slot, now_us_);
  }
  return slot;
}

int32_t HostTier::Put(const ChainHash& hash, uint64_t salt, const int32_t* tokens) {
  if (salts_.empty() || Find(hash, salt, tokens, /*use=*/true) != kNone) return kNone;
  if (index_.Find(hash) != kNone) return kNone;  // another block of this hash
  if (free_.empty()) Forget(order_.oldest());
  const int32_t slot = free_.back();
  free_.pop_back();
  order_.Append(slot, now_us_);
  index_.Insert(slot, hash);
  salts_[static_cast<size_t>(slot)] = salt;
  std::copy_n(tokens, block_size_, tokens_.data() + slot * block_size_);
  return slot;
}

void HostTier::Advance(int64_t now_us) {
  now_us_ = now_us;
  while (order_.oldest() != kNone && now_us - order_.last_used_us(order_.oldest()) >= ttl_us_) {
    Forget(order_.oldest());
  }
}

void HostTier::Clear() {
  while (order_.oldest() != kNone) Forget(order_.oldest());
}

}  // namespace allspark
