#include "kv_cache/chain_index.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <bit>

namespace allspark {

ChainHash HashOfNext(const ChainHash& before, uint64_t salt, const int32_t* tokens,
                     int64_t num_tokens) {
  const auto num_bytes = static_cast<size_t>(num_tokens) * sizeof(int32_t);
  const XXH128_hash_t own = XXH3_128bits_withSeed(tokens, num_bytes, salt);
  const uint64_t chain[] = {before.low, before.high, own.low64, own.high64};
  const XXH128_hash_t hash = XXH3_128bits(chain, sizeof(chain));
  return {hash.low64, hash.high64};
}

ChainIndex::ChainIndex(int64_t num_entries)
    : hashes_(static_cast<size_t>(num_entries)),
      slots_(std::bit_ceil(2 * static_cast<size_t>(num_entries) + 1), kNone) {}

size_t ChainIndex::SlotOf(const ChainHash& hash) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = hash.low & mask;
  while (slots_[slot] != kNone && hash_of(slots_[slot]) != hash) slot = (slot + 1) & mask;
  return slot;
}

void ChainIndex::Insert(int32_t entry, const ChainHash& hash) {
  slots_[SlotOf(hash)] = entry;
  hashes_[static_cast<size_t>(entry)] = hash;
}

// Closes the gap, so that every entry can be reached from its hash's slot: no tombstones, which
// would fill the table up.
void ChainIndex::Erase(int32_t entry) {
  const size_t mask = slots_.size() - 1;
  size_t gap = SlotOf(hash_of(entry));
  for (size_t slot = (gap + 1) & mask; slots_[slot] != kNone; slot = (slot + 1) & mask) {
    const size_t home = hash_of(slots_[slot]).low & mask;
    if (((slot - home) & mask) < ((slot - gap) & mask)) continue;
    slots_[gap] = slots_[slot];
    gap = slot;
  }
  slots_[gap] = kNone;
}

}  // namespace allspark
