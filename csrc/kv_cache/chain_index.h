// ChainIndex: finds entries by the hash of the chain of blocks that ends with them. Open addressing
// with linear probing; sized at construction, nothing allocates later. Private to kv_cache/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace allspark {

// The hash of a chain of blocks: of all their tokens, in order, and the salt.
struct ChainHash {
  uint64_t low = 0, high = 0;
  bool operator==(const ChainHash&) const = default;
};

// The hash of the chain that continues `before` by a block of these tokens.
ChainHash HashOfNext(const ChainHash& before, uint64_t salt, const int32_t* tokens,
                     int64_t num_tokens);

class ChainIndex {
 public:
  static constexpr int32_t kNone = -1;

  // For entries 0 to num_entries - 1.
  explicit ChainIndex(int64_t num_entries);

  const ChainHash& hash_of(int32_t entry) const { return hashes_[static_cast<size_t>(entry)]; }
  // The entry with this hash, or kNone.
  int32_t Find(const ChainHash& hash) const { return slots_[SlotOf(hash)]; }
  // Requires: neither entry nor hash is there.
  void Insert(int32_t entry, const ChainHash& hash);
  void Erase(int32_t entry);

 private:
  // The slot of the entry with this hash, or the free one where it belongs.
  size_t SlotOf(const ChainHash& hash) const;

  std::vector<ChainHash> hashes_;  // by entry
  std::vector<int32_t> slots_;     // a power of two, half empty
};

}  // namespace allspark
