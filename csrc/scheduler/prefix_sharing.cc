// The scheduler's part of the prefix cache: which cached blocks a sequence takes instead of
// computing them, and when others can take its own.

#include <algorithm>
#include <span>

#include "base/int_math.h"
#include "scheduler/scheduler.h"

namespace allspark {

bool Scheduler::MaySearch(const ScheduledSequence& sequence) const {
  return config_.enable_prefix_cache && sequence.token_ids != nullptr;
}

// What TakeCached would take for a sequence that is not admitted yet.
PrefixCache::Match Scheduler::FindCached(const ScheduledSequence& candidate) const {
  if (!MaySearch(candidate)) return {};
  const int64_t num_tokens = std::min(candidate.num_tokens - 1, candidate.max_cached);
  return cache_.FindAll(std::span(candidate.token_ids, static_cast<size_t>(num_tokens)),
                        candidate.cache_salt);
}

// Takes the cached blocks of the tokens that the sequence would compute next, and returns where it
// then begins. At least one token is left, since its logits are wanted, and all after the first
// max_cached are. If the sequence's last block is partly filled, it takes nothing.
int64_t Scheduler::TakeCached(ScheduledSequence* sequence) {
  std::vector<int32_t>& table = sequence->block_table;
  int64_t& begin = sequence->plan_begin;
  begin = sequence->num_computed;
  sequence->num_restored = 0;
  if (!MaySearch(*sequence) || Capacity(*sequence) != begin) return begin;
  const int64_t most = std::min(sequence->num_tokens - 1, sequence->max_cached);
  while (begin + config_.block_size <= most) {
    const int32_t parent = table.empty() ? PrefixCache::kNone : table.back();
    int32_t block = cache_.Find(parent, sequence->cache_salt, sequence->token_ids + begin);
    if (block != PrefixCache::kNone) {
      // The sequence needs one block less, and no available block was taken.
      if (cache_.IsInUse(block)) ++slack_;
      cache_.AddReference(block);
    } else {
      block = cache_.Restore(parent, sequence->cache_salt, sequence->token_ids + begin);
      if (block == PrefixCache::kNone) break;
      sequence->num_restored += config_.block_size;
    }
    table.push_back(block);
    begin += config_.block_size;
  }
  return begin;
}

// Puts the blocks that tokens [begin, end) complete into the index. Sequences behind this one in
// the step that fills the blocks may take them at once, all others once they are filled. If the
// same block was computed twice, the sequence continues with the indexed one and releases its own.
void Scheduler::IndexBlocks(ScheduledSequence* sequence, int64_t begin, int64_t end, bool filled) {
  if (!config_.enable_prefix_cache || sequence->token_ids == nullptr) return;
  int32_t* const table = sequence->block_table.data();
  int32_t parent =
      begin < config_.block_size ? PrefixCache::kNone : table[begin / config_.block_size - 1];
  for (int64_t i = begin / config_.block_size; i < end / config_.block_size; parent = table[i++]) {
    const int32_t known = cache_.Insert(table[i], parent, sequence->cache_salt,
                                        sequence->token_ids + i * config_.block_size, filled);
    if (known == table[i]) continue;
    if (known == PrefixCache::kNone || !filled) return;
    cache_.AddReference(known);
    cache_.Release(table[i]);
    table[i] = known;
  }
}

// After a step that was planned and not computed: withdraws the blocks that it would have filled.
void Scheduler::DropUncomputed() {
  for (ScheduledSequence* s = running_.head; s != nullptr; s = s->next) {
    for (ScheduledSequence* beam = s; beam != nullptr; beam = beam->next_beam) {
      ReleaseBlocks(beam, BlocksFor(beam->num_computed));
      if (beam->num_computed < Capacity(*beam)) cache_.Withdraw(beam->block_table.back());
    }
  }
}

}  // namespace allspark
