#include "kv_cache/prefix_cache.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace allspark {
namespace {

// So that new tables get contiguous blocks, as many blocks as an extent has are evicted at once, if
// at least kLeastUnusedExtents times as many are unused and less than 1 / kFreePart of the pool is
// free. (With tables that come and go at random, 17 of 20 blocks are then contiguous with the one
// before; without it, 11.)
constexpr int64_t kLeastUnusedExtents = 16;
constexpr int64_t kFreePart = 32;

}  // namespace

PrefixCache::PrefixCache(const PrefixCacheOptions& options)
    : options_(options),
      pool_(options.num_blocks),
      index_(options.enabled ? options.num_blocks : 0),
      host_(options.enabled ? options.num_host_blocks : 0, options.block_size, options.ttl_us),
      unused_(options.num_blocks) {
  AS_CHECK(options.block_size >= 1) << "block_size is " << options.block_size << ", less than 1";
  const auto num_blocks = static_cast<size_t>(options.num_blocks);
  entries_.resize(num_blocks);
  if (!options.enabled) return;
  tokens_.resize(num_blocks * static_cast<size_t>(options.block_size));
  if (options.num_host_blocks > 0) copies_.reserve(2 * num_blocks);
}

void PrefixCache::MakeRoom(int32_t after, bool grows) {
  const int64_t extent = pool_.extent_blocks();
  const bool may_forget_more = unused_.size() >= kLeastUnusedExtents * extent &&
                               pool_.num_free() < pool_.num_blocks() / kFreePart;
  int64_t count = pool_.num_free() == 0 ? 1 : 0;
  if (may_forget_more && grows && !pool_.HasRun(after)) count = extent;
  for (int64_t i = 0; i < count && unused_.oldest() != kNone; ++i) {
    const int32_t block = unused_.oldest();
    const int32_t slot = host_.Put(index_.hash_of(block), At(block).salt, TokensOf(block));
    if (slot != kNone) copies_.push_back({.to_host = true, .block = block, .slot = slot});
    Evict(block);
  }
}

int32_t PrefixCache::Allocate(int32_t after, bool grows) {
  MakeRoom(after, grows);
  return pool_.Allocate(after, grows);
}

bool PrefixCache::IsInUse(int32_t block) const {
  return pool_.reference_count(block) > (At(block).indexed ? 1 : 0);
}

void PrefixCache::AddReference(int32_t block) {
  if (At(block).indexed && !IsInUse(block)) unused_.Erase(block);
  pool_.AddReference(block);
}

void PrefixCache::Release(int32_t block) {
  AS_CHECK(IsInUse(block)) << "block " << block << " is released by nobody who uses it";
  pool_.Release(block);
  if (!At(block).indexed || IsInUse(block)) return;
  AS_CHECK(At(block).filled) << "block " << block << " was left before it was filled";
  unused_.Append(block, now_us_);
}

ChainHash PrefixCache::HashOf(int32_t parent) const {
  return parent != kNone ? index_.hash_of(parent) : ChainHash{};
}

ChainHash PrefixCache::HashOf(const ChainHash& before, uint64_t salt, const int32_t* tokens) const {
  const ChainHash hash = HashOfNext(before, salt, tokens, options_.block_size);
  return {hash.low & options_.hash_mask, hash.high & options_.hash_mask};
}

bool PrefixCache::Holds(int32_t block, int32_t parent, uint64_t salt, const int32_t* tokens) const {
  const Entry& entry = At(block);
  const int32_t* own = tokens_.data() + block * options_.block_size;
  return entry.parent == parent && entry.salt == salt &&
         std::equal(own, own + options_.block_size, tokens);
}

int32_t PrefixCache::Find(int32_t parent, uint64_t salt, const int32_t* tokens) const {
  if (!enabled() || (parent != kNone && !At(parent).indexed)) return kNone;
  const int32_t block = index_.Find(HashOf(HashOf(parent), salt, tokens));
  return block != kNone && Holds(block, parent, salt, tokens) ? block : kNone;
}

int32_t PrefixCache::Restore(int32_t parent, uint64_t salt, const int32_t* tokens) {
  if (host_.num_used() == 0 || num_available() == 0) return kNone;
  if (parent != kNone && !At(parent).indexed) return kNone;
  const ChainHash hash = HashOf(HashOf(parent), salt, tokens);
  const int32_t slot = host_.Find(hash, salt, tokens, /*use=*/true);
  if (slot == kNone || index_.Find(hash) != kNone) return kNone;
  const int32_t block = Allocate(parent);
  // Allocate may have evicted a block into this very slot.
  if (host_.Find(hash, salt, tokens, /*use=*/false) != slot) {
    pool_.Release(block);
    return kNone;
  }
  copies_.push_back({.to_host = false, .block = block, .slot = slot});
  return Insert(block, parent, salt, tokens, /*filled=*/true);
}

int64_t PrefixCache::CountOnHost(const Match& match, std::span<const int32_t> tokens,
                                 uint64_t salt) {
  const auto block_size = static_cast<size_t>(options_.block_size);
  ChainHash hash = HashOf(match.last);
  int64_t num_blocks = 0;
  tokens = tokens.subspan(static_cast<size_t>(match.num_blocks) * block_size);
  for (; tokens.size() >= block_size; tokens = tokens.subspan(block_size), ++num_blocks) {
    hash = HashOf(hash, salt, tokens.data());
    if (host_.Find(hash, salt, tokens.data(), /*use=*/false) == kNone) break;
  }
  return num_blocks;
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
  const ChainHash hash = HashOf(HashOf(parent), salt, tokens);
  if (const int32_t known = index_.Find(hash); known != kNone) {
    return Holds(known, parent, salt, tokens) ? known : kNone;
  }
  index_.Insert(block, hash);
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

void PrefixCache::EraseFromIndex(int32_t block) {
  At(block).indexed = At(block).filled = false;
  index_.Erase(block);
}

void PrefixCache::Evict(int32_t block) {
  unused_.Erase(block);
  EraseFromIndex(block);
  pool_.Release(block);
}

void PrefixCache::Advance(int64_t now_us) {
  AS_CHECK(now_us >= now_us_) << "time goes back from " << now_us_ << " to " << now_us;
  now_us_ = now_us;
  host_.Advance(now_us);
  while (unused_.oldest() != kNone &&
         now_us - unused_.last_used_us(unused_.oldest()) >= options_.ttl_us) {
    Evict(unused_.oldest());
  }
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
  return end != kNone ? UnpinChain(end) * options_.block_size : 0;
}

int64_t PrefixCache::UnpinChain(int32_t end) {
  --At(end).num_pin_ends;
  int64_t num_blocks = 0;
  for (int32_t block = end; block != kNone; block = At(block).parent, ++num_blocks) {
    if (--At(block).num_pins > 0) continue;
    Release(block);
    --num_pinned_;
  }
  return num_blocks;
}

void PrefixCache::UnpinAll(uint64_t salt) {
  for (int32_t block = 0; block < pool_.num_blocks(); ++block) {
    while (At(block).num_pin_ends > 0 && At(block).salt == salt) UnpinChain(block);
  }
}

int64_t PrefixCache::Clear() {
  for (int32_t block = 0; block < pool_.num_blocks(); ++block) {
    if (At(block).num_pins == 0) continue;
    At(block).num_pins = At(block).num_pin_ends = 0;
    Release(block);
  }
  num_pinned_ = 0;
  const int64_t num_forgotten = unused_.size();
  while (unused_.oldest() != kNone) Evict(unused_.oldest());
  host_.Clear();
  copies_.clear();
  return num_forgotten;
}

}  // namespace allspark
