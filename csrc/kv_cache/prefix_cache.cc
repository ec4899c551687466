#include "kv_cache/prefix_cache.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <string>

#include "base/check.h"

namespace allspark {

PrefixCache::PrefixCache(const PrefixCacheOptions& options)
    : options_(options), pool_(options.num_blocks) {
  AS_CHECK(options.block_size >= 1) << "block_size is " << options.block_size << ", less than 1";
  const auto num_blocks = static_cast<size_t>(options.num_blocks);
  entries_.resize(num_blocks);
  if (!options.enabled) return;
  tokens_.resize(num_blocks * static_cast<size_t>(options.block_size));
  slots_.assign(std::bit_ceil(2 * num_blocks + 1), kNone);
}

int32_t PrefixCache::Allocate() {
  if (pool_.num_free() == 0 && oldest_ != kNone) Evict(oldest_);
  return pool_.Allocate();
}

bool PrefixCache::IsInUse(int32_t block) const {
  return pool_.reference_count(block) > (At(block).indexed ? 1 : 0);
}

void PrefixCache::AddReference(int32_t block) {
  if (At(block).indexed && !IsInUse(block)) EraseUnused(block);
  pool_.AddReference(block);
}

void PrefixCache::Release(int32_t block) {
  AS_CHECK(IsInUse(block)) << "block " << block << " is released by nobody who uses it";
  pool_.Release(block);
  if (!At(block).indexed || IsInUse(block)) return;
  AS_CHECK(At(block).filled) << "block " << block << " was left before it was filled";
  AppendUnused(block);
}

PrefixCache::Hash PrefixCache::HashOf(int32_t parent, uint64_t salt, const int32_t* tokens) const {
  const Hash before = parent != kNone ? At(parent).hash : Hash{};
  const auto num_bytes = static_cast<size_t>(options_.block_size) * sizeof(int32_t);
  const XXH128_hash_t own = XXH3_128bits_withSeed(tokens, num_bytes, salt);
  const uint64_t chain[] = {before.low, before.high, own.low64, own.high64};
  const XXH128_hash_t hash = XXH3_128bits(chain, sizeof(chain));
  return {hash.low64 & options_.hash_mask, hash.high64 & options_.hash_mask};
}

bool PrefixCache::Holds(int32_t block, int32_t parent, uint64_t salt, const int32_t* tokens) const {
  const Entry& entry = At(block);
  const int32_t* own = tokens_.data() + block * options_.block_size;
  return entry.parent == parent && entry.salt == salt &&
         std::equal(own, own + options_.block_size, tokens);
}

size_t PrefixCache::SlotOf(const Hash& hash) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = hash.low & mask;
  while (slots_[slot] != kNone && At(slots_[slot]).hash != hash) slot = (slot + 1) & mask;
  return slot;
}

int32_t PrefixCache::Find(int32_t parent, uint64_t salt, const int32_t* tokens) const {
  if (!enabled() || (parent != kNone && !At(parent).indexed)) return kNone;
  const int32_t block = slots_[SlotOf(HashOf(parent, salt, tokens))];
  return block != kNone && Holds(block, parent, salt, tokens) ? block : kNone;
}

PrefixCache::Match PrefixCache::FindAll(std::span<const int32_t> tokens, uint64_t salt) const {
  Match match;
  const auto block_size = static_cast<size_t>(options_.block_size);
  for (; tokens.size() >= block_size; tokens = tokens.subspan(block_size)) {
    const int32_t block = Find(match.last, salt, tokens.data());
    if (block == kNone) break;
    match.last = block;
    ++match.num_blocks;
    if (IsInUse(block)) ++match.num_in_use;
  }
  return match;
}

int32_t PrefixCache::Insert(int32_t block, int32_t parent, uint64_t salt, const int32_t* tokens,
                            bool filled) {
  AS_CHECK(IsInUse(block)) << "block " << block << " is indexed by nobody who uses it";
  Entry& entry = At(block);
  if (entry.indexed) {
    entry.filled |= filled;
    return block;
  }
  if (!enabled() || (parent != kNone && !At(parent).indexed)) return kNone;
  const Hash hash = HashOf(parent, salt, tokens);
  const size_t slot = SlotOf(hash);
  if (slots_[slot] != kNone) {
    return Holds(slots_[slot], parent, salt, tokens) ? slots_[slot] : kNone;
  }
  slots_[slot] = block;
  entry.hash = hash;
  entry.salt = salt;
  entry.parent = parent;
  entry.indexed = true;
  entry.filled = filled;
  std::copy_n(tokens, options_.block_size, TokensOf(block));
  pool_.AddReference(block);
  return block;
}

void PrefixCache::Withdraw(int32_t block) {
  if (!At(block).indexed || At(block).filled) return;
  AS_CHECK(IsInUse(block)) << "block " << block << " was left before it was filled";
  EraseFromIndex(block);
  pool_.Release(block);
}

// Closes the gap, so that every block can be reached from its hash's slot: no tombstones, which
// would fill the table up.
void PrefixCache::EraseFromIndex(int32_t block) {
  At(block).indexed = At(block).filled = false;
  const size_t mask = slots_.size() - 1;
  size_t gap = SlotOf(At(block).hash);
  for (size_t slot = (gap + 1) & mask; slots_[slot] != kNone; slot = (slot + 1) & mask) {
    const size_t home = At(slots_[slot]).hash.low & mask;
    if (((slot - home) & mask) < ((slot - gap) & mask)) continue;
    slots_[gap] = slots_[slot];
    gap = slot;
  }
  slots_[gap] = kNone;
}

void PrefixCache::Evict(int32_t block) {
  EraseUnused(block);
  EraseFromIndex(block);
  pool_.Release(block);
}

void PrefixCache::AppendUnused(int32_t block) {
  Entry& entry = At(block);
  entry.last_used_us = now_us_;
  entry.older = newest_;
  entry.newer = kNone;
  (newest_ != kNone ? At(newest_).newer : oldest_) = block;
  newest_ = block;
  ++num_unused_;
}

void PrefixCache::EraseUnused(int32_t block) {
  const Entry& entry = At(block);
  (entry.older != kNone ? At(entry.older).newer : oldest_) = entry.newer;
  (entry.newer != kNone ? At(entry.newer).older : newest_) = entry.older;
  --num_unused_;
}

void PrefixCache::Advance(int64_t now_us) {
  AS_CHECK(now_us >= now_us_) << "time goes back from " << now_us_ << " to " << now_us;
  now_us_ = now_us;
  while (oldest_ != kNone && now_us - At(oldest_).last_used_us >= options_.ttl_us) Evict(oldest_);
}

Result<int64_t> PrefixCache::Pin(std::span<const int32_t> tokens, uint64_t salt) {
  const Match match = FindAll(tokens, salt);
  int64_t num_more = 0;
  for (int32_t block = match.last; block != kNone; block = At(block).parent) {
    if (At(block).num_pins == 0) ++num_more;
  }
  if (num_pinned_ + num_more > options_.max_pinned_blocks) {
    return Status::ResourceExhausted(std::to_string(num_pinned_) + " blocks are pinned and " +
                                     std::to_string(num_more) + " more are asked for; at most " +
                                     std::to_string(options_.max_pinned_blocks) +
                                     " may be, so that the longest request fits beside them");
  }
  for (int32_t block = match.last; block != kNone; block = At(block).parent) {
    if (At(block).num_pins++ == 0) AddReference(block);
  }
  if (match.last != kNone) ++At(match.last).num_pin_ends;
  num_pinned_ += num_more;
  return match.num_blocks * options_.block_size;
}

int64_t PrefixCache::Unpin(std::span<const int32_t> tokens, uint64_t salt) {
  int32_t end = FindAll(tokens, salt).last;
  while (end != kNone && At(end).num_pin_ends == 0) end = At(end).parent;
  if (end == kNone) return 0;
  --At(end).num_pin_ends;
  int64_t num_blocks = 0;
  for (int32_t block = end; block != kNone; block = At(block).parent, ++num_blocks) {
    if (--At(block).num_pins > 0) continue;
    Release(block);
    --num_pinned_;
  }
  return num_blocks * options_.block_size;
}

int64_t PrefixCache::Clear() {
  for (int32_t block = 0; block < pool_.num_blocks(); ++block) {
    if (At(block).num_pins == 0) continue;
    At(block).num_pins = At(block).num_pin_ends = 0;
    Release(block);
  }
  num_pinned_ = 0;
  const int64_t num_forgotten = num_unused_;
  while (oldest_ != kNone) Evict(oldest_);
  return num_forgotten;
}

}  // namespace allspark
