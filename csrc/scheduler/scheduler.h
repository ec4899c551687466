// Decides what each step computes: admission, chunked prefill, decode, preemption. Pure logic over
// block ids: no tensor, no clock, no thread. The step thread owns it. After construction nothing
// allocates: sequences are the caller's objects, linked intrusively. README.md beside this file has
// the policy.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kv_cache/prefix_cache.h"
#include "scheduler/draft_grants.h"

namespace allspark {

// The most rows for which a prefill token counts (SchedulerConfig::double_cost_depth).
inline constexpr int64_t kMostTokenCost = 8;
// A step without decodes may take so many times as long as with a chunk at the begin of a sequence.
inline constexpr int64_t kStepCostAlone = 4;

inline constexpr int64_t kNoTokenLimit = std::numeric_limits<int64_t>::max();

// The scheduler's view of one sequence. The owner reserves block_table for its longest length and
// keeps num_tokens up to date (prompt + generated): one more after each step that planned it with
// `samples`.
struct ScheduledSequence {
  // Set by the owner before Add.
  int64_t id = 0;
  int64_t priority = 0;              // larger runs earlier
  int64_t num_tokens = 0;            // known tokens: prompt + generated
  int64_t max_length = 0;            // num_tokens never exceeds this
  std::vector<int32_t> block_table;  // capacity reserved for ceil(max_length / block_size)
  // The known tokens, for the prefix cache; null: it shares no block.
  const int32_t* token_ids = nullptr;
  // What its blocks depend on besides the tokens; only sequences with the same salt share them.
  uint64_t cache_salt = 0;
  // Set by the owner before Plan: how many draft tokens it can have beside a decode, the chance
  // that each is accepted if those before it are, and the cost of drafting one token for all
  // drafting sequences, in steps of one row. Plan lowers num_drafts to what the step may compute.
  // num_tokens + num_drafts < max_length.
  int64_t num_drafts = 0;
  double acceptance_rate = 1;
  double draft_cost = 0;
  // How many of its first tokens may be taken from the prefix cache. It is less where the owner
  // wants the model's outputs for the tokens after them, until that is done.
  int64_t max_cached = kNoTokenLimit;
  // It is in no plan. Hold sets it; the owner sets it back, or a preemption does.
  bool held = false;

  // The next beam of the same search. The first beam stands for all: it alone is added, removed, in
  // lists, and has token_ids; the others have its priority and max_length. A beam with num_tokens 0
  // does not exist at the moment.
  ScheduledSequence* next_beam = nullptr;

  // The scheduler's.
  int64_t arrival = 0;
  int64_t num_computed = 0;  // tokens whose KV is in the cache
  int64_t plan_begin = 0;    // where its newest chunk began: others filled the blocks before it
  int64_t num_restored = 0;  // tokens before it that came from the host tier for this plan
  int64_t num_preemptions = 0;
  // For a beam without blocks that is not the first: the earlier beam from which it takes those of
  // the first num_shared tokens.
  const ScheduledSequence* sharing = nullptr;
  int64_t num_shared = 0;
  enum class State : int { kNone, kWaiting, kRunning } state = State::kNone;
  ScheduledSequence* prev = nullptr;
  ScheduledSequence* next = nullptr;

  // Every beam has one token left to compute: what the sequence needs next is a decode, not a
  // prefill.
  bool decodes() const {
    for (const ScheduledSequence* beam = this; beam != nullptr; beam = beam->next_beam) {
      if (beam->num_tokens > 0 && beam->num_tokens - beam->num_computed != 1) return false;
    }
    return true;
  }
};

// The contents of one block are to be copied to another.
struct BlockCopy {
  int32_t from, to;
};

struct SchedulerConfig {
  int64_t max_batch = 32;      // running sequences
  int64_t chunk_tokens = 512;  // prefill tokens per step
  // Bounds how long a decode waits for prefills: in a step with decodes, prefill has what they
  // leave of these rows, and at least half of them.
  int64_t max_rows_beside_decodes = 512;
  // There, a prefill token counts for more rows the further it is into its sequence, since its
  // attention takes longer: 1 + depth / double_cost_depth, at most kMostTokenCost. In a step
  // without decodes it counts for a kStepCostAlone-th of that, and for one at least. 0: each counts
  // for one.
  int64_t double_cost_depth = 0;
  // A prefill with more tokens left leaves shorter ones behind it what they need, up to half of a
  // step's budget: they do not wait for its end.
  int64_t long_prefill_tokens = kNoTokenLimit;
  // How many steps in a row decodes may wait for prefills: such a step prefills alone.
  int64_t max_steps_without_decodes = 0;
  int64_t block_size = 32;
  int64_t num_blocks = 0;
  // Most decodes and drafts of a step with drafts; drafts beyond that are left out.
  int64_t max_draft_rows = 0;
  double draft_row_cost = 0.03;  // cost of each row after the first, in steps of one row
  bool enable_prefix_cache = false;
  int64_t prefix_cache_ttl_us = 0;
  int64_t max_pinned_blocks = 0;
  int64_t num_host_blocks = 0;  // of the prefix cache's second tier
  // A sequence whose blocks others need leaves (interrupted()) instead of waiting again.
  bool interrupts = false;
};

// One sequence's part of a step: compute tokens [begin, begin + num_tokens). The tokens between the
// sequence's num_computed and begin were found in the prefix cache, or are computed by a chunk in
// front of this one: a step writes all keys and values of a layer before it reads any.
struct PlannedChunk {
  ScheduledSequence* sequence;
  int64_t begin;
  int64_t num_tokens;
  bool samples;            // reaches the newest known token: its logits are wanted
  int64_t num_drafts = 0;  // of num_tokens: the last ones, beyond the known tokens
};

class Scheduler {
 public:
  // Requires: all bounds at least 1. The pool should hold one sequence of the longest max_length: a
  // sequence that outgrows the whole pool goes back to waiting and is never admitted again.
  explicit Scheduler(const SchedulerConfig& config);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Queues a new sequence behind those of the same priority. Requires: state kNone, an empty
  // block_table with capacity for max_length, 1 <= num_tokens <= max_length. Walks the queue from
  // both ends.
  void Add(ScheduledSequence* sequence);
  // Takes it out in any state (kNone: nothing happens) and frees its blocks. Between Plan and
  // Commit the plan stays as it is; Commit passes over the sequence, whose memory must last until
  // then.
  void Remove(ScheduledSequence* sequence);
  // Between steps: all running sequences give their blocks back and wait, at their old places.
  void PreemptAll();
  // Plans the next step and takes blocks for it; the time must not go back. Empty when nothing can
  // run: there is no sequence, all running ones are held or wait for blocks of held ones, or
  // nothing runs and the first in line does not fit the pool. Valid until the next call. Decodes
  // come first, where they need not wait for prefills, then prefill chunks; at most max_batch
  // chunks and max_batch + chunk_tokens tokens, or max_draft_rows. A plan that was not committed is
  // planned again.
  const std::vector<PlannedChunk>& Plan(int64_t now_us = 0);
  // Sequences that the last Plan interrupted for lack of blocks, if the config says so: their state
  // is kNone, and they are in no plan. Valid until the next call.
  const std::vector<ScheduledSequence*>& interrupted() const { return interrupted_; }
  // After Plan, if an owner has fewer draft tokens than were planned: it lowered num_drafts of the
  // planned sequences, and the plan follows.
  void TrimDrafts();
  // The planned step was computed: moves num_computed, but not over drafts. Call before the owner
  // appends sampled tokens, at most once per Plan.
  void Commit();
  // After Commit, once for each accepted draft of the step, in order, when it is among the known
  // tokens: it then counts as computed.
  void AcceptDraft(ScheduledSequence* sequence);
  // After Commit, instead of appending a token: the owner cannot use the newest token's result yet,
  // so that token counts as not computed. Requires: no beams, no drafts.
  void Hold(ScheduledSequence* sequence);
  // After Commit, once everything of every beam is computed: from now on beams[i] continues the old
  // beams[parents[i]], and beams beyond `parents` do not exist. Sets num_tokens, to which the owner
  // adds the chosen tokens. Full blocks are shared; the returned copies, which the caller makes,
  // are valid until the next call. Requires: beams are the whole search, the first one running.
  const std::vector<BlockCopy>& Fork(std::span<ScheduledSequence* const> beams,
                                     std::span<const int32_t> parents);

  int64_t num_waiting() const { return waiting_.size; }
  int64_t num_running() const { return running_.size; }
  int64_t num_preemptions() const { return num_preemptions_; }
  const BlockPool& pool() const { return cache_.pool(); }
  const PrefixCache& prefix_cache() const { return cache_; }
  // Between steps: to pin and to clear.
  PrefixCache& prefix_cache() { return cache_; }
  const SchedulerConfig& config() const { return config_; }
  // Waiting then running sequences, each in order of (priority, arrival), for inspection by tests
  // and for ending all.
  ScheduledSequence* first_waiting() const { return waiting_.head; }
  ScheduledSequence* first_running() const { return running_.head; }

 private:
  // Linked through the sequences; always sorted by (priority descending, arrival ascending).
  struct SequenceList {
    ScheduledSequence* head = nullptr;
    ScheduledSequence* tail = nullptr;
    int64_t size = 0;
    int64_t num_rows = 0;  // beams count one by one

    void Insert(ScheduledSequence* sequence);
    void Erase(ScheduledSequence* sequence);
  };

  int64_t BlocksFor(int64_t num_tokens) const;
  int64_t Capacity(const ScheduledSequence& sequence) const;
  int64_t Demand(const ScheduledSequence& sequence) const;
  int64_t KnownBlocks(const ScheduledSequence& sequence) const;
  bool MayPutOffDecodes() const;
  void PlanDecodes();
  bool PlanDecode(ScheduledSequence* sequence);
  void PlanPrefill();
  void PlanDrafts();
  bool IsLong(const ScheduledSequence& sequence) const;
  int64_t WantedBehind(const ScheduledSequence& sequence, int64_t most, bool admitting) const;
  int64_t PlanChunks(ScheduledSequence* sequence, int64_t budget);
  int64_t PlanChunk(ScheduledSequence* sequence, ScheduledSequence* beam, int64_t budget);
  int64_t Slack() const;
  bool CanAdmit(const ScheduledSequence& candidate) const;
  void Admit(ScheduledSequence* candidate);
  bool SecureFreeBlock(const ScheduledSequence* sequence);
  void TakeBlock(ScheduledSequence* sequence);
  void MakeRoom(ScheduledSequence* victim);
  void Preempt(ScheduledSequence* victim);
  void DropPreemptedFromPlan();
  void ReleaseBlocks(ScheduledSequence* sequence, int64_t num_kept);
  void Reset(ScheduledSequence* sequence, ScheduledSequence::State state);

  // What beams add; beams.cc.
  int64_t SharedBeamBlocks(const ScheduledSequence& beam) const;
  void TakeSharedBlocks(ScheduledSequence* beam);
  bool TakeBeamBlocks(ScheduledSequence* beam);
  void RememberSharedBlocks(ScheduledSequence* sequence);
  void ReleaseOldTables(int64_t num_full);
  void BranchOff(ScheduledSequence* heir, ScheduledSequence* beam);

  // What the prefix cache adds; prefix_sharing.cc.
  bool MaySearch(const ScheduledSequence& sequence) const;
  PrefixCache::Match FindCached(const ScheduledSequence& candidate) const;
  int64_t TakeCached(ScheduledSequence* sequence);
  void IndexBlocks(ScheduledSequence* sequence, int64_t begin, int64_t end, bool filled);
  void DropUncomputed();

  SchedulerConfig config_;
  PrefixCache cache_;
  std::vector<PlannedChunk> plan_;  // capacity max_batch
  std::vector<DraftGrant> grants_;  // the same
  std::vector<ScheduledSequence*> interrupted_;
  bool plan_committed_ = true;
  bool decodes_wait_ = false;          // in this plan
  int64_t step_cost_ = 1;              // of this plan: kStepCostAlone without decodes
  int64_t steps_without_decodes_ = 0;  // the newest in a row, while there were decodes
  bool preempted_in_plan_ = false;
  // Blocks that admission may still promise in this plan.
  int64_t slack_ = 0;
  SequenceList waiting_;
  SequenceList running_;
  int64_t num_preemptions_ = 0;
  int64_t next_arrival_ = 0;
  // For Fork: the old tables, the beam that takes over each, and the partial blocks of the others.
  std::vector<std::vector<int32_t>> old_tables_;
  std::vector<ScheduledSequence*> heirs_;
  std::vector<int32_t> unused_blocks_;
  std::vector<BlockCopy> copies_;
};

}  // namespace allspark
