// The scheduler's part of the prefix cache: which blocks a sequence takes instead of computing
// them, and when its own are there for others.

#include <algorithm>
#include <span>

#include "base/int_math.h"
#include "scheduler/scheduler.h"

namespace allspark {

bool Scheduler::MaySearch(const ScheduledSequence& sequence) const {
  return config_.enable_prefix_cache && sequence.token_ids != nullptr && !sequence.computes_all;
}

// What TakeCached would take for a newcomer.
PrefixCache::Match Scheduler::FindCached(const ScheduledSequence& candidate) const {
  if (!MaySearch(candidate)) return {};
  const auto num_tokens = static_cast<size_t>(candidate.num_tokens - 1);
  return cache_.FindAll(std::span(candidate.token_ids, num_tokens), candidate.cache_salt);
}

// Takes the blocks that hold what the sequence would compute next, and returns where it then
// begins. One token is left at least: its logits are wanted. Where the sequence's last block is
// half full there is nothing to take.
int64_t Scheduler::TakeCached(ScheduledSequence* sequence) {
  std::vector<int32_t>& table = sequence->block_table;
  int64_t& begin = sequence->plan_begin;
  begin = sequence->num_computed;
  sequence->num_restored = 0;
  if (!MaySearch(*sequence) || Capacity(*sequence) != begin) return begin;
  while (begin + config_.block_size < sequence->num_tokens) {
    const int32_t parent = table.empty() ? PrefixCache::kNone : table.back();
    int32_t block = cache_.Find(parent, sequence->cache_salt, sequence->token_ids + begin);
    if (block != PrefixCache::kNone) {
      // Its demand is one less, and no block less is available.
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

// Makes the blocks known that the tokens [begin, end) complete: to sequences behind this one in the
// step that fills them already, and once they are filled to everybody. Where the same block came
// into being twice, the sequence goes on with the one that is known and gives its own back.
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

// After a step that was planned and not computed: what it would have filled is not there.
void Scheduler::DropUncomputed() {
  for (ScheduledSequence* s = running_.head; s != nullptr; s = s->next) {
    for (ScheduledSequence* beam = s; beam != nullptr; beam = beam->next_beam) {
      ReleaseBlocks(beam, BlocksFor(beam->num_computed));
      if (beam->num_computed < Capacity(*beam)) cache_.Withdraw(beam->block_table.back());
    }
  }
}

}  // namespace allspark
