// The scheduler's part for beams: which blocks they share, when a search continues with other beams
// and after a preemption.

#include <algorithm>

#include "base/check.h"
#include "scheduler/scheduler.h"

namespace allspark {

// Blocks that a beam will take, or took, from an earlier one.
int64_t Scheduler::SharedBeamBlocks(const ScheduledSequence& beam) const {
  return beam.num_shared / config_.block_size;
}

void Scheduler::TakeSharedBlocks(ScheduledSequence* beam) {
  for (int64_t i = 0; i < SharedBeamBlocks(*beam); ++i) {
    const int32_t block = beam->sharing->block_table[static_cast<size_t>(i)];
    cache_.AddReference(block);
    beam->block_table.push_back(block);
  }
  beam->num_computed = beam->plan_begin = beam->num_shared;
}

// False while the blocks that an empty beam shares are still to be computed.
bool Scheduler::TakeBeamBlocks(ScheduledSequence* beam) {
  if (!beam->block_table.empty() || beam->sharing == nullptr) return true;
  if (beam->sharing->num_computed < beam->num_shared) return false;
  TakeSharedBlocks(beam);
  return true;
}

// Called before the beams lose their blocks: notes which of them were shared. Recomputed beams then
// need no more blocks than they had.
void Scheduler::RememberSharedBlocks(ScheduledSequence* sequence) {
  for (auto* beam = sequence->next_beam; beam != nullptr; beam = beam->next_beam) {
    if (beam->block_table.empty()) continue;  // what it is to share is known
    beam->sharing = nullptr;
    beam->num_shared = 0;
    for (auto* earlier = sequence; earlier != beam; earlier = earlier->next_beam) {
      const auto common = std::mismatch(beam->block_table.begin(), beam->block_table.end(),
                                        earlier->block_table.begin(), earlier->block_table.end());
      const int64_t shared = (common.first - beam->block_table.begin()) * config_.block_size;
      if (shared > beam->num_shared) {
        beam->sharing = earlier;
        beam->num_shared = shared;
      }
    }
  }
}

const std::vector<BlockCopy>& Scheduler::Fork(std::span<ScheduledSequence* const> beams,
                                              std::span<const int32_t> parents) {
  AS_CHECK(beams[0]->state == ScheduledSequence::State::kRunning)
      << "sequence " << beams[0]->id << " does not run";
  AS_CHECK(parents.size() >= 1 && parents.size() <= beams.size())
      << parents.size() << " beams are to go on, of " << beams.size();
  // All checks come first: when one fails, the beams still have the blocks that their end releases.
  for (size_t i = 0; i < beams.size(); ++i) {
    AS_CHECK(beams[i]->num_computed == beams[i]->num_tokens)
        << "beam " << i << " of sequence " << beams[0]->id << " is not computed";
  }
  for (const int32_t parent : parents) {
    AS_CHECK(!beams[static_cast<size_t>(parent)]->block_table.empty())
        << "beam " << parent << " is not there";
  }
  const int64_t num_tokens = beams[0]->num_tokens;
  for (size_t i = 0; i < beams.size(); ++i) {
    old_tables_[i].swap(beams[i]->block_table);
    beams[i]->sharing = nullptr;
    beams[i]->num_shared = beams[i]->plan_begin = 0;
    beams[i]->num_tokens = beams[i]->num_computed = 0;
  }
  // The first beam that continues an old one takes over its blocks.
  heirs_.assign(beams.size(), nullptr);
  for (size_t i = 0; i < parents.size(); ++i) {
    const auto parent = static_cast<size_t>(parents[i]);
    beams[i]->num_tokens = num_tokens;
    if (heirs_[parent] != nullptr) continue;
    heirs_[parent] = beams[i];
    beams[i]->num_computed = beams[i]->plan_begin = num_tokens;
    beams[i]->block_table.swap(old_tables_[parent]);
  }
  ReleaseOldTables(num_tokens / config_.block_size);
  copies_.clear();
  auto spare = old_tables_.begin();
  for (size_t i = 0; i < beams.size(); ++i) {
    const bool is_there = i < parents.size();
    ScheduledSequence* const heir = is_there ? heirs_[static_cast<size_t>(parents[i])] : nullptr;
    if (beams[i] == heir) continue;
    while (spare->capacity() == 0) ++spare;  // There is one for each that is no heir.
    beams[i]->block_table.swap(*spare);
    if (is_there) BranchOff(heir, beams[i]);
  }
  for (; !unused_blocks_.empty(); unused_blocks_.pop_back()) cache_.Release(unused_blocks_.back());
  return copies_;
}

// Releases the full blocks of beams that nobody continues. Their partial blocks, which nobody
// shares, are kept, since each can take a copy.
void Scheduler::ReleaseOldTables(int64_t num_full) {
  unused_blocks_.clear();
  for (std::vector<int32_t>& table : old_tables_) {
    for (; !table.empty(); table.pop_back()) {
      if (static_cast<int64_t>(table.size()) > num_full) {
        unused_blocks_.push_back(table.back());
      } else {
        cache_.Release(table.back());
      }
    }
  }
}

// `beam` continues the same old beam as `heir`: it takes references to the full blocks and a copy
// of the partial one. If no kept block can take the copy, `beam` has no blocks for now: it takes
// them when it is planned, and computes the tokens of the partial block again.
void Scheduler::BranchOff(ScheduledSequence* heir, ScheduledSequence* beam) {
  const int64_t num_full = heir->num_computed / config_.block_size;
  const bool is_partial = static_cast<int64_t>(heir->block_table.size()) > num_full;
  beam->sharing = heir;
  beam->num_shared = num_full * config_.block_size;
  if (is_partial && unused_blocks_.empty()) return;
  TakeSharedBlocks(beam);
  beam->num_computed = beam->plan_begin = heir->num_computed;
  if (!is_partial) return;
  beam->block_table.push_back(unused_blocks_.back());
  unused_blocks_.pop_back();
  copies_.push_back({heir->block_table.back(), beam->block_table.back()});
}

}  // namespace allspark
