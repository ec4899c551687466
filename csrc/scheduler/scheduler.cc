#include "scheduler/scheduler.h"

#include <algorithm>

#include "base/check.h"
#include "base/int_math.h"

namespace allspark {
namespace {

using State = ScheduledSequence::State;

const SchedulerConfig& Checked(const SchedulerConfig& config) {
  AS_CHECK(config.max_batch >= 1) << "max_batch is " << config.max_batch << ", less than 1";
  AS_CHECK(config.chunk_tokens >= 1)
      << "chunk_tokens is " << config.chunk_tokens << ", less than 1";
  AS_CHECK(config.max_rows_beside_decodes >= 1)
      << "max_rows_beside_decodes is " << config.max_rows_beside_decodes << ", less than 1";
  AS_CHECK(config.double_cost_depth >= 0)
      << "double_cost_depth is " << config.double_cost_depth << ", less than 0";
  AS_CHECK(config.long_prefill_tokens >= 1)
      << "long_prefill_tokens is " << config.long_prefill_tokens << ", less than 1";
  AS_CHECK(config.max_steps_without_decodes >= 0)
      << "max_steps_without_decodes is " << config.max_steps_without_decodes << ", less than 0";
  AS_CHECK(config.block_size >= 1) << "block_size is " << config.block_size << ", less than 1";
  AS_CHECK(config.num_blocks >= 1) << "num_blocks is " << config.num_blocks << ", less than 1";
  return config;
}

// The one order of the scheduler. Arrivals are unique, so it is total.
bool Precedes(const ScheduledSequence& a, const ScheduledSequence& b) {
  return a.priority != b.priority ? a.priority > b.priority : a.arrival < b.arrival;
}

int64_t Remaining(const ScheduledSequence& sequence) {
  return sequence.num_tokens - sequence.num_computed;
}

int64_t NumBlocks(const ScheduledSequence& sequence) {
  return static_cast<int64_t>(sequence.block_table.size());
}

int64_t NumBeams(const ScheduledSequence& sequence) {
  int64_t count = 0;
  for (auto* beam = &sequence; beam != nullptr; beam = beam->next_beam) ++count;
  return count;
}

void SetState(ScheduledSequence* sequence, State state) {
  for (auto* beam = sequence; beam != nullptr; beam = beam->next_beam) beam->state = state;
}

}  // namespace

// Walks from both ends at once. New arrivals belong near the tail and preempted sequences near the
// head, so neither pays for the thousands that may wait.
void Scheduler::SequenceList::Insert(ScheduledSequence* sequence) {
  ScheduledSequence* next = head;
  for (ScheduledSequence* last = tail; next != nullptr && !Precedes(*sequence, *next);
       next = next->next, last = last->prev) {
    if (Precedes(*last, *sequence)) {
      next = last->next;
      break;
    }
  }
  sequence->next = next;
  sequence->prev = next != nullptr ? next->prev : tail;
  (sequence->prev != nullptr ? sequence->prev->next : head) = sequence;
  (next != nullptr ? next->prev : tail) = sequence;
  ++size;
  num_rows += NumBeams(*sequence);
}

void Scheduler::SequenceList::Erase(ScheduledSequence* sequence) {
  (sequence->prev != nullptr ? sequence->prev->next : head) = sequence->next;
  (sequence->next != nullptr ? sequence->next->prev : tail) = sequence->prev;
  sequence->prev = sequence->next = nullptr;
  --size;
  num_rows -= NumBeams(*sequence);
}

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(Checked(config)),
      cache_({.num_blocks = config.num_blocks,
              .block_size = config.block_size,
              .enabled = config.enable_prefix_cache,
              .ttl_us = config.prefix_cache_ttl_us,
              .max_pinned_blocks = config.max_pinned_blocks,
              .num_host_blocks = config.num_host_blocks}) {
  const auto max_batch = static_cast<size_t>(config.max_batch);
  plan_.reserve(max_batch);
  grants_.reserve(max_batch);
  interrupted_.reserve(max_batch);
  old_tables_.resize(max_batch);
  heirs_.reserve(max_batch);
  unused_blocks_.reserve(max_batch);
  copies_.reserve(max_batch);
}

int64_t Scheduler::BlocksFor(int64_t num_tokens) const {
  return CeilDiv(num_tokens, config_.block_size);
}

// Tokens that the sequence's blocks hold.
int64_t Scheduler::Capacity(const ScheduledSequence& sequence) const {
  return NumBlocks(sequence) * config_.block_size;
}

// Blocks that the sequence will still take before it has generated a block's length: those of its
// known tokens and one to grow into, for each beam.
int64_t Scheduler::Demand(const ScheduledSequence& sequence) const {
  int64_t demand = 0;
  for (auto* beam = &sequence; beam != nullptr; beam = beam->next_beam) {
    demand += std::min(BlocksFor(beam->num_tokens) + 1, BlocksFor(beam->max_length)) -
              std::max(NumBlocks(*beam), SharedBeamBlocks(*beam));
  }
  return demand;
}

// Blocks of the known tokens of a sequence that has none.
int64_t Scheduler::KnownBlocks(const ScheduledSequence& sequence) const {
  int64_t count = 0;
  for (auto* beam = &sequence; beam != nullptr; beam = beam->next_beam) {
    count += BlocksFor(beam->num_tokens) - SharedBeamBlocks(*beam);
  }
  return count;
}

void Scheduler::Add(ScheduledSequence* sequence) {
  AS_CHECK(sequence->state == State::kNone)
      << "sequence " << sequence->id << " is in the scheduler already";
  AS_CHECK(sequence->num_tokens >= 1 && sequence->num_tokens <= sequence->max_length)
      << "sequence " << sequence->id << ": num_tokens is " << sequence->num_tokens
      << ", outside [1, max_length = " << sequence->max_length << "]";
  AS_CHECK(sequence->block_table.empty())
      << "sequence " << sequence->id << " brings " << NumBlocks(*sequence) << " blocks";
  AS_CHECK(NumBeams(*sequence) <= config_.max_batch)
      << "sequence " << sequence->id << " has " << NumBeams(*sequence) << " beams, max_batch is "
      << config_.max_batch;
  const auto capacity = static_cast<int64_t>(sequence->block_table.capacity());
  AS_CHECK(capacity >= BlocksFor(sequence->max_length))
      << "sequence " << sequence->id << ": block_table is reserved for " << capacity
      << " blocks, max_length " << sequence->max_length << " needs "
      << BlocksFor(sequence->max_length);
  sequence->arrival = next_arrival_++;
  sequence->num_computed = 0;
  sequence->num_preemptions = 0;
  SetState(sequence, State::kWaiting);
  waiting_.Insert(sequence);
}

void Scheduler::Remove(ScheduledSequence* sequence) {
  if (sequence->state == State::kNone) return;
  (sequence->state == State::kWaiting ? waiting_ : running_).Erase(sequence);
  Reset(sequence, State::kNone);
}

// Releases all blocks of the sequence and its beams.
void Scheduler::Reset(ScheduledSequence* sequence, State state) {
  for (auto* beam = sequence; beam != nullptr; beam = beam->next_beam) {
    ReleaseBlocks(beam, 0);
    beam->num_computed = 0;
    beam->held = false;
  }
  SetState(sequence, state);
}

// Releases all blocks but the first num_kept, last block first: the prefix cache then evicts the
// ends of chains before their beginnings, and of extents that are equally free, the pool hands out
// that of the first blocks first.
void Scheduler::ReleaseBlocks(ScheduledSequence* sequence, int64_t num_kept) {
  while (NumBlocks(*sequence) > num_kept) {
    const int32_t block = sequence->block_table.back();
    if (Capacity(*sequence) > sequence->plan_begin) cache_.Withdraw(block);  // it was to fill it
    cache_.Release(block);
    sequence->block_table.pop_back();
  }
  sequence->plan_begin = std::min(sequence->plan_begin, Capacity(*sequence));
}

const std::vector<PlannedChunk>& Scheduler::Plan(int64_t now_us) {
  if (!plan_committed_) DropUncomputed();
  cache_.Advance(now_us);
  plan_.clear();
  interrupted_.clear();
  plan_committed_ = false;
  preempted_in_plan_ = false;
  if (MayPutOffDecodes()) PlanPrefill();
  decodes_wait_ = !plan_.empty();
  size_t num_decodes = 0;
  if (!decodes_wait_) {
    PlanDecodes();
    num_decodes = plan_.size();
    PlanPrefill();
  }
  // A step that prefills has enough arithmetic without drafts.
  if (plan_.size() == num_decodes && !preempted_in_plan_) PlanDrafts();
  if (preempted_in_plan_) DropPreemptedFromPlan();
  for (const PlannedChunk& chunk : plan_) chunk.sequence->num_drafts = chunk.num_drafts;
  return plan_;
}

void Scheduler::Commit() {
  AS_CHECK(!plan_committed_) << "Commit without a Plan before it";
  plan_committed_ = true;
  steps_without_decodes_ = decodes_wait_ ? steps_without_decodes_ + 1 : 0;
  for (const PlannedChunk& chunk : plan_) {
    ScheduledSequence* sequence = chunk.sequence;
    if (sequence->state != State::kRunning) continue;  // removed since
    const int64_t begin = sequence->num_computed;
    AS_CHECK(begin <= chunk.begin) << "sequence " << sequence->id << " was planned from token "
                                   << chunk.begin << " and has " << begin << " computed";
    sequence->num_computed = chunk.begin + chunk.num_tokens - chunk.num_drafts;
    IndexBlocks(sequence, begin, sequence->num_computed, /*filled=*/true);
  }
}

void Scheduler::AcceptDraft(ScheduledSequence* sequence) {
  const int64_t begin = sequence->num_computed++;
  IndexBlocks(sequence, begin, sequence->num_computed, /*filled=*/true);
}

void Scheduler::Hold(ScheduledSequence* sequence) {
  AS_CHECK(sequence->next_beam == nullptr && Remaining(*sequence) == 0)
      << "sequence " << sequence->id << " has " << Remaining(*sequence)
      << " tokens to compute, or beams";
  // A full block may be in other tables by now. It must not be written again, so another block
  // takes its place.
  const bool is_full = sequence->num_computed % config_.block_size == 0;
  sequence->num_computed -= is_full ? config_.block_size : 1;
  if (is_full) ReleaseBlocks(sequence, BlocksFor(sequence->num_computed));
  sequence->held = true;
}

// Whether there are decodes, and prefills may still go before them.
bool Scheduler::MayPutOffDecodes() const {
  if (steps_without_decodes_ >= config_.max_steps_without_decodes) return false;
  for (const auto* sequence = running_.head; sequence != nullptr; sequence = sequence->next) {
    if (!sequence->held && sequence->decodes()) return true;
  }
  return false;
}

void Scheduler::PlanDecodes() {
  for (ScheduledSequence* sequence = running_.head; sequence != nullptr;
       sequence = sequence->next) {
    // A beam may wait for the others.
    const bool waits = Remaining(*sequence) == 0 && sequence->next_beam != nullptr;
    AS_CHECK((Remaining(*sequence) >= 1 || waits) && sequence->num_tokens <= sequence->max_length)
        << "sequence " << sequence->id << " has " << sequence->num_tokens << " tokens, "
        << sequence->num_computed << " of them computed, max_length " << sequence->max_length;
    if (sequence->held || !sequence->decodes()) continue;
    if (!PlanDecode(sequence)) {
      MakeRoom(sequence);  // It was the last of the list.
      break;
    }
  }
}

// Plans a token of each beam. If blocks are short, plans nothing and returns false.
bool Scheduler::PlanDecode(ScheduledSequence* sequence) {
  const size_t num_planned = plan_.size();
  for (auto* beam = sequence; beam != nullptr; beam = beam->next_beam) {
    if (beam->num_tokens == 0) continue;
    if (Capacity(*beam) == beam->num_computed) {
      if (!SecureFreeBlock(sequence)) {
        plan_.erase(plan_.begin() + static_cast<int64_t>(num_planned), plan_.end());
        return false;
      }
      TakeBlock(beam);
    }
    beam->num_restored = 0;
    plan_.push_back({beam, beam->num_computed, 1, true});
  }
  return true;
}

// Merges the running sequences that prefill with the waiting ones, in one order: a new sequence of
// high priority does not wait for the end of a long prompt of low priority.
void Scheduler::PlanPrefill() {
  slack_ = Slack();
  int64_t budget = config_.chunk_tokens;
  step_cost_ = plan_.empty() ? kStepCostAlone : 1;
  if (!plan_.empty()) {
    const int64_t rows = config_.max_rows_beside_decodes;
    const auto num_decodes = static_cast<int64_t>(plan_.size());
    budget = std::min(budget, std::max(rows - num_decodes, CeilDiv(rows, 2)));
  }
  bool admitting = true;
  // The first long one keeps half of the budget; another has what nobody behind it needs.
  bool has_long = false;
  const auto plan = [&](ScheduledSequence* next) {
    int64_t share = budget;
    if (IsLong(*next)) {
      share -= WantedBehind(*next, has_long ? budget : budget / 2, admitting);
      has_long = true;
    }
    const int64_t cost = share > 0 ? PlanChunks(next, share) : 0;
    budget -= cost;
    return cost;
  };
  ScheduledSequence* sequence = running_.head;
  while (budget > 0) {
    while (sequence != nullptr && (sequence->held || sequence->decodes())) {
      sequence = sequence->next;
    }
    ScheduledSequence* candidate = waiting_.head;
    if (admitting && candidate != nullptr &&
        (sequence == nullptr || Precedes(*candidate, *sequence))) {
      admitting = CanAdmit(*candidate);
      if (admitting) {
        Admit(candidate);
        plan(candidate);
      }
    } else if (sequence != nullptr) {
      const int64_t cost = plan(sequence);
      if (cost == 0 && sequence->next_beam != nullptr && running_.size == 1) {
        // The whole pool is too small for these beams; it always holds one sequence.
        MakeRoom(sequence);
        admitting = true;
        sequence = nullptr;
      } else {
        sequence = sequence->next;
      }
    } else {
      break;
    }
  }
}

bool Scheduler::IsLong(const ScheduledSequence& sequence) const {
  return Remaining(sequence) > config_.long_prefill_tokens;
}

// Tokens that prefills behind a running one need, up to `most`, long ones apart: of those that run,
// and of the next that can be admitted.
int64_t Scheduler::WantedBehind(const ScheduledSequence& sequence, int64_t most,
                                bool admitting) const {
  int64_t wanted = 0;
  for (const auto* s = sequence.next; s != nullptr && wanted < most; s = s->next) {
    if (!s->held && !s->decodes() && !IsLong(*s)) wanted += Remaining(*s);
  }
  const ScheduledSequence* const candidate = waiting_.head;
  const bool waits = wanted < most && admitting && candidate != nullptr && !IsLong(*candidate);
  if (waits && CanAdmit(*candidate)) wanted += Remaining(*candidate);
  return std::min(wanted, most);
}

// Extends the planned decodes by drafts that are worth their rows, as far as there are blocks that
// are not promised to others.
void Scheduler::PlanDrafts() {
  grants_.clear();
  for (const PlannedChunk& chunk : plan_) {
    const ScheduledSequence& sequence = *chunk.sequence;
    AS_CHECK(sequence.num_drafts == 0 ||
             sequence.num_tokens + sequence.num_drafts < sequence.max_length)
        << "sequence " << sequence.id << " drafts " << sequence.num_drafts << " tokens after "
        << sequence.num_tokens << ", max_length " << sequence.max_length;
    grants_.push_back({.most = sequence.num_drafts,
                       .acceptance_rate = sequence.acceptance_rate,
                       .cost = sequence.draft_cost});
  }
  GrantDrafts(grants_, config_.max_draft_rows, config_.draft_row_cost);
  for (size_t i = 0; i < plan_.size(); ++i) {
    PlannedChunk& chunk = plan_[i];
    ScheduledSequence& sequence = *chunk.sequence;
    const int64_t end = sequence.num_tokens + grants_[i].granted;
    while (Capacity(sequence) < end && cache_.num_available() > 0 && Demand(sequence) > 0) {
      TakeBlock(&sequence);
    }
    chunk.num_drafts = std::min(grants_[i].granted, Capacity(sequence) - sequence.num_tokens);
    chunk.num_tokens += chunk.num_drafts;
  }
}

void Scheduler::TrimDrafts() {
  for (PlannedChunk& chunk : plan_) {
    if (chunk.num_drafts <= chunk.sequence->num_drafts) continue;
    chunk.num_tokens -= chunk.num_drafts - chunk.sequence->num_drafts;
    chunk.num_drafts = chunk.sequence->num_drafts;
  }
}

// Plans tokens of a sequence and its beams together that cost up to `budget`, and returns their
// cost.
int64_t Scheduler::PlanChunks(ScheduledSequence* sequence, int64_t budget) {
  int64_t cost = 0;
  for (auto* beam = sequence; beam != nullptr && cost < budget; beam = beam->next_beam) {
    if (Remaining(*beam) > 0 && TakeBeamBlocks(beam)) {
      cost += PlanChunk(sequence, beam, budget - cost);
    }
  }
  return cost;
}

// Plans tokens of a beam's prefill that cost up to `budget`, at least one, and returns their cost,
// at most `budget`: fewer where blocks are short. If none is free and its own have no room, the
// sequences behind it are preempted; the last of the list waits instead, and keeps its blocks.
int64_t Scheduler::PlanChunk(ScheduledSequence* sequence, ScheduledSequence* beam, int64_t budget) {
  const int64_t begin = TakeCached(beam);
  // A token costs token / unit rows.
  const int64_t doubling = config_.double_cost_depth;
  const int64_t unit = std::max<int64_t>(doubling * step_cost_, 1);
  const int64_t token =
      doubling == 0 ? 1 : std::clamp(doubling + begin, unit, kMostTokenCost * unit);
  int64_t num_tokens =
      std::min(beam->num_tokens - begin, std::max<int64_t>(budget * unit / token, 1));
  while (Capacity(*beam) < begin + num_tokens) {
    const int64_t room = Capacity(*beam) - begin;
    if (cache_.num_available() == 0 && (room > 0 || !SecureFreeBlock(sequence))) {
      num_tokens = room;
      break;
    }
    TakeBlock(beam);
  }
  if (num_tokens > 0) {
    plan_.push_back({beam, begin, num_tokens, begin + num_tokens == beam->num_tokens});
    IndexBlocks(beam, begin, begin + num_tokens, /*filled=*/false);
  } else if (begin > beam->num_computed) {
    // Only sequences in this step may hold blocks that it fills, since the step may fail.
    ReleaseBlocks(beam, BlocksFor(beam->num_computed));
    slack_ = Slack();
  }
  return std::min(CeilDiv(num_tokens * token, unit), budget);
}

// Blocks that admission may promise. A block that a running sequence takes lowers the available
// blocks and the sequence's demand alike, so the difference holds while a step is planned.
int64_t Scheduler::Slack() const {
  int64_t slack = cache_.num_available();
  for (const ScheduledSequence* s = running_.head; s != nullptr; s = s->next) slack -= Demand(*s);
  return slack;
}

bool Scheduler::CanAdmit(const ScheduledSequence& candidate) const {
  // Blocks that a preemption just freed are for those that ran out; admitting at once would thrash.
  const bool is_full = running_.num_rows + NumBeams(candidate) > config_.max_batch;
  if (running_.size > 0 && (preempted_in_plan_ || is_full)) return false;
  const int64_t num_in_use = FindCached(candidate).num_in_use;
  if (running_.size == 0) {
    return KnownBlocks(candidate) - num_in_use <= cache_.num_available();
  }
  return Demand(candidate) - num_in_use <= slack_;
}

void Scheduler::Admit(ScheduledSequence* candidate) {
  waiting_.Erase(candidate);
  SetState(candidate, State::kRunning);
  running_.Insert(candidate);
  slack_ -= Demand(*candidate);
}

// Preempts or interrupts sequences behind this one until a block is free. Returns false if this is
// the last and no block is free.
bool Scheduler::SecureFreeBlock(const ScheduledSequence* sequence) {
  while (cache_.num_available() == 0) {
    if (running_.tail == sequence) return false;
    MakeRoom(running_.tail);
  }
  return true;
}

void Scheduler::TakeBlock(ScheduledSequence* sequence) {
  std::vector<int32_t>& table = sequence->block_table;
  const int32_t last = table.empty() ? PrefixCache::kNone : table.back();
  const bool grows = sequence->max_length - sequence->num_tokens > config_.block_size;
  table.push_back(cache_.Allocate(last, grows));
}

void Scheduler::PreemptAll() {
  while (running_.tail != nullptr) Preempt(running_.tail);
}

// Frees the blocks of a running sequence for those in front of it: preempts or interrupts it.
void Scheduler::MakeRoom(ScheduledSequence* victim) {
  preempted_in_plan_ = true;
  if (!config_.interrupts) return Preempt(victim);
  Remove(victim);
  interrupted_.push_back(victim);
}

void Scheduler::Preempt(ScheduledSequence* victim) {
  running_.Erase(victim);
  RememberSharedBlocks(victim);
  Reset(victim, State::kWaiting);
  waiting_.Insert(victim);
  ++victim->num_preemptions;
  ++num_preemptions_;
}

// A prefill may preempt decodes that were planned before it.
void Scheduler::DropPreemptedFromPlan() {
  std::erase_if(plan_,
                [](const PlannedChunk& chunk) { return chunk.sequence->state != State::kRunning; });
}

}  // namespace allspark
