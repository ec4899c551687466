// A scheduler with sequences of its own and an executor that fakes the model: it remembers which
// token of which sequence was written into each slot of the cache, so that a block in two tables or
// a token that was not recomputed shows at the next step that reads it. Check() states the
// invariants.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/scheduler.h"

namespace allspark::testing {

struct TestSequence : ScheduledSequence {
  int64_t last_planned_step = -1;
  int64_t num_offered = 0;   // drafts before the plan
  int64_t num_accepted = 0;  // drafts of the step at hand that turn out right
  int64_t num_sharers = 0;

  // Which token is at a position: (the sequence that it is of, the position).
  std::pair<int64_t, int64_t> Token(int64_t position) const {
    return {sharing != nullptr && position < num_shared ? sharing->id : id, position};
  }
};

class Harness {
 public:
  // `trace`: where to write events, in the format that tests/python/scheduler_oracle.py reads; may
  // be null.
  explicit Harness(const SchedulerConfig& config, std::ostream* trace = nullptr)
      : scheduler_(config),
        slots_(static_cast<size_t>(config.num_blocks * config.block_size), {-1, -1}),
        trace_(trace) {}

  Scheduler& scheduler() { return scheduler_; }
  const std::vector<PlannedChunk>& plan() const { return *plan_; }
  std::vector<std::unique_ptr<TestSequence>>& sequences() { return sequences_; }
  // The first broken invariant; empty: none.
  const std::string& error() const { return error_; }

  // How many of a chunk's drafts turn out to be the sampled tokens.
  void set_accept(std::function<int64_t(const PlannedChunk&)> accept) {
    accept_ = std::move(accept);
  }

  // How many of a chunk's drafts its owner then has.
  void set_trim(std::function<int64_t(const PlannedChunk&)> trim) { trim_ = std::move(trim); }

  // Begins with the first num_shared tokens of `sharing`, which must outlive it.
  TestSequence* Add(int64_t priority, int64_t num_tokens, int64_t max_length,
                    TestSequence* sharing = nullptr, int64_t num_shared = 0) {
    auto sequence = std::make_unique<TestSequence>();
    const int64_t block_size = scheduler_.config().block_size;
    sequence->id = next_id_++;
    sequence->priority = priority;
    sequence->num_tokens = num_tokens;
    sequence->max_length = max_length;
    if (sharing != nullptr) {
      sequence->sharing = sharing;
      sequence->num_shared = num_shared;
      ++sharing->num_sharers;
    }
    sequence->block_table.reserve(static_cast<size_t>((max_length + block_size - 1) / block_size));
    scheduler_.Add(sequence.get());
    if (trace_ != nullptr) {
      *trace_ << "add " << sequence->id << " priority " << priority << " tokens " << num_tokens
              << " max_length " << max_length << "\n";
    }
    sequences_.push_back(std::move(sequence));
    return sequences_.back().get();
  }

  void Remove(TestSequence* sequence) {
    scheduler_.Remove(sequence);
    if (trace_ != nullptr) *trace_ << "remove " << sequence->id << "\n";
    Check(sequence->block_table.empty() && sequence->num_computed == 0, "removed but not reset");
    const auto it = std::find_if(sequences_.begin(), sequences_.end(),
                                 [&](const auto& owned) { return owned.get() == sequence; });
    // What others name lives until the end, as in the engine it does while they do.
    if (sequence->num_sharers > 0) removed_.push_back(std::move(*it));
    sequences_.erase(it);
  }

  // Plans, computes and commits one step; appends a token where the plan samples. `ends(sequence)`
  // says whether a sequence that got a token ends with it (at max_length it does anyway). Returns
  // false once an invariant broke.
  template <typename Ends>
  bool Step(Ends&& ends) {
    Plan();
    return Finish(ends);
  }
  bool Step() {
    return Step([](const TestSequence&) { return false; });
  }

  // Plans a step and checks the plan. plan() may be read until Finish removes what has ended.
  void Plan() {
    ++step_;
    for (const auto& sequence : sequences_) sequence->num_offered = sequence->num_drafts;
    plan_ = &scheduler_.Plan();
    if (trace_ != nullptr) WriteTrace();
    CheckPool();
    CheckLists();
    CheckPlan();
    if (!trim_) return;
    for (const PlannedChunk& chunk : *plan_) chunk.sequence->num_drafts = trim_(chunk);
    scheduler_.TrimDrafts();
  }

  // The rest of a step.
  template <typename Ends>
  bool Finish(Ends&& ends) {
    Execute();
    scheduler_.Commit();
    if (trace_ != nullptr) *trace_ << "commit\n";
    ended_.clear();
    for (const PlannedChunk& chunk : *plan_) {
      auto* sequence = static_cast<TestSequence*>(chunk.sequence);
      Check(sequence->num_computed == chunk.begin + chunk.num_tokens - chunk.num_drafts,
            "Commit did not count");
      if (!chunk.samples) continue;
      for (int64_t i = 0; i < sequence->num_accepted; ++i) {
        scheduler_.AcceptDraft(sequence);
        ++sequence->num_tokens;
      }
      const bool full = sequence->num_tokens == sequence->max_length;
      if (!full) ++sequence->num_tokens;
      // As in the engine, a sequence ends as it reaches max_length; a prompt of that length at
      // once.
      if (full || sequence->num_tokens == sequence->max_length || ends(*sequence)) {
        ended_.push_back(sequence);
      }
    }
    for (TestSequence* sequence : ended_) Remove(sequence);
    return error_.empty();
  }

  // A step that fails: planned, not computed, all of it removed.
  bool FailStep() {
    Plan();
    ended_.clear();
    for (const PlannedChunk& chunk : *plan_) {
      ended_.push_back(static_cast<TestSequence*>(chunk.sequence));
    }
    for (TestSequence* sequence : ended_) Remove(sequence);
    return error_.empty();
  }

 private:
  void Check(bool condition, const char* what) {
    if (condition || !error_.empty()) return;
    error_ = std::string(what) + " in step " + std::to_string(step_);
  }

  static bool Precedes(const ScheduledSequence& a, const ScheduledSequence& b) {
    return a.priority > b.priority || (a.priority == b.priority && a.arrival < b.arrival);
  }

  void CheckPool() {
    const BlockPool& pool = scheduler_.pool();
    references_.assign(static_cast<size_t>(pool.num_blocks()), 0);
    int64_t used = 0;
    for (const auto& sequence : sequences_) {
      for (const int32_t block : sequence->block_table) {
        if (++references_[static_cast<size_t>(block)] == 1) ++used;
      }
    }
    for (const auto& sequence : sequences_) {
      for (size_t i = 0; i < sequence->block_table.size(); ++i) {
        const int64_t end = static_cast<int64_t>(i + 1) * scheduler_.config().block_size;
        Check(references_[static_cast<size_t>(sequence->block_table[i])] == 1 ||
                  end <= sequence->num_computed,
              "a block in two writable tables");
      }
    }
    Check(pool.num_free() + used == pool.num_blocks(), "free + used differs from the total");
    for (int32_t block = 0; block < pool.num_blocks(); ++block) {
      Check(pool.reference_count(block) == references_[static_cast<size_t>(block)],
            "a reference count differs from the table entries");
    }
  }

  int64_t CheckList(const ScheduledSequence* head, ScheduledSequence::State state) {
    int64_t count = 0;
    for (const ScheduledSequence* s = head; s != nullptr; s = s->next, ++count) {
      Check(s->state == state, "a state differs from the list it is in");
      Check(s->next == nullptr || (s->next->prev == s && Precedes(*s, *s->next)),
            "a list is out of order");
    }
    return count;
  }

  void CheckLists() {
    const int64_t waiting =
        CheckList(scheduler_.first_waiting(), ScheduledSequence::State::kWaiting);
    const int64_t running =
        CheckList(scheduler_.first_running(), ScheduledSequence::State::kRunning);
    Check(waiting == scheduler_.num_waiting(), "num_waiting");
    Check(running == scheduler_.num_running(), "num_running");
    Check(waiting + running == static_cast<int64_t>(sequences_.size()), "a sequence was lost");
    Check(running <= scheduler_.config().max_batch, "more run than max_batch");
    const int64_t block_size = scheduler_.config().block_size;
    for (const auto& s : sequences_) {
      const auto capacity = static_cast<int64_t>(s->block_table.size()) * block_size;
      if (s->state == ScheduledSequence::State::kWaiting) {
        Check(capacity == 0 && s->num_computed == 0, "a waiting sequence has blocks");
      } else {
        // Drafts may have taken the block that comes next.
        const int64_t most_ahead = scheduler_.config().max_draft_rows > 0 ? 2 : 1;
        Check(capacity >= s->num_computed && capacity < s->num_tokens + most_ahead * block_size,
              "too few or too many blocks");
      }
    }
  }

  void CheckPlan() {
    const SchedulerConfig& config = scheduler_.config();
    int64_t prefill = 0, rows = 0, drafts = 0;
    bool after_prefill = false;
    for (const PlannedChunk& chunk : *plan_) {
      auto* s = static_cast<TestSequence*>(chunk.sequence);
      Check(s->state == ScheduledSequence::State::kRunning, "planned but not running");
      Check(s->last_planned_step != step_, "planned twice");
      s->last_planned_step = step_;
      Check(chunk.begin == s->num_computed && chunk.num_tokens >= 1, "planned from elsewhere");
      const int64_t end = chunk.begin + chunk.num_tokens - chunk.num_drafts;
      Check(end <= s->num_tokens, "planned beyond the known tokens");
      Check(chunk.samples == (end == s->num_tokens), "samples");
      Check(chunk.num_drafts >= 0 && chunk.num_drafts <= s->num_offered, "drafts nobody made");
      Check(chunk.num_drafts == s->num_drafts, "the owner does not know of its drafts");
      Check(chunk.num_drafts == 0 || end - chunk.begin == 1, "drafts of a prefill");
      drafts += chunk.num_drafts;
      Check(static_cast<int64_t>(s->block_table.size()) * config.block_size >=
                chunk.begin + chunk.num_tokens,
            "planned without blocks");
      const bool decode = chunk.begin > 0 && s->num_tokens - chunk.begin == 1;
      Check(!decode || !after_prefill, "a decode after a prefill");
      after_prefill |= !decode;
      if (!decode) prefill += chunk.num_tokens;
      rows += chunk.num_tokens;
      // What was just admitted did not overtake anything that waits.
      Check(chunk.begin > 0 || scheduler_.first_waiting() == nullptr ||
                Precedes(*s, *scheduler_.first_waiting()),
            "admitted past the head of the line");
    }
    Check(prefill <= config.chunk_tokens, "more prefill than chunk_tokens");
    Check(rows == prefill || prefill <= config.chunk_tokens_beside_decodes,
          "more prefill than decodes allow");
    Check(rows <= std::max(config.max_batch + config.chunk_tokens, config.max_draft_rows),
          "more rows than promised");
    Check(drafts == 0 || (prefill == 0 && rows <= config.max_draft_rows), "too many drafts");
    for (const ScheduledSequence* s = scheduler_.first_running(); s != nullptr; s = s->next) {
      const bool planned = static_cast<const TestSequence*>(s)->last_planned_step == step_;
      Check(planned || s->num_tokens - s->num_computed > 1, "a running decode is not in the step");
      Check(planned || s != scheduler_.first_running(), "the first in line is not in the step");
    }
  }

  // Reads what attention would read and writes what the step computes.
  void Execute() {
    for (const PlannedChunk& chunk : *plan_) {
      auto& sequence = static_cast<TestSequence&>(*chunk.sequence);
      sequence.num_accepted = accept_ ? accept_(chunk) : 0;
      const int64_t right = sequence.num_tokens + sequence.num_accepted;
      for (int64_t p = 0; p < chunk.begin; ++p) {
        Check(Slot(*chunk.sequence, p) == sequence.Token(p),
              "the cache holds another token than the sequence's");
      }
      for (int64_t p = chunk.begin; p < chunk.begin + chunk.num_tokens; ++p) {
        Slot(*chunk.sequence, p) =
            p < right ? sequence.Token(p) : std::pair<int64_t, int64_t>{-1, p};
      }
    }
  }

  std::pair<int64_t, int64_t>& Slot(const ScheduledSequence& sequence, int64_t position) {
    const int64_t block_size = scheduler_.config().block_size;
    const int64_t block = sequence.block_table[static_cast<size_t>(position / block_size)];
    return slots_[static_cast<size_t>(block * block_size + position % block_size)];
  }

  void WriteTrace() {
    *trace_ << "plan";
    for (const PlannedChunk& chunk : *plan_) {
      *trace_ << " " << chunk.sequence->id << ":" << chunk.begin << "+" << chunk.num_tokens
              << (chunk.samples ? "*" : "");
    }
    *trace_ << "\nstate free " << scheduler_.pool().num_free() << " preempted "
            << scheduler_.num_preemptions() << " waiting";
    for (auto* s = scheduler_.first_waiting(); s != nullptr; s = s->next) *trace_ << " " << s->id;
    *trace_ << " running";
    for (auto* s = scheduler_.first_running(); s != nullptr; s = s->next) *trace_ << " " << s->id;
    *trace_ << "\n";
  }

  Scheduler scheduler_;
  std::function<int64_t(const PlannedChunk&)> accept_;
  std::function<int64_t(const PlannedChunk&)> trim_;
  std::vector<std::unique_ptr<TestSequence>> sequences_;
  std::vector<std::unique_ptr<TestSequence>> removed_;
  std::vector<std::pair<int64_t, int64_t>> slots_;  // (sequence, position) last written
  std::ostream* trace_;
  const std::vector<PlannedChunk>* plan_ = nullptr;
  std::vector<TestSequence*> ended_;
  std::vector<int32_t> references_;
  std::string error_;
  int64_t next_id_ = 0;
  int64_t step_ = 0;
};

}  // namespace allspark::testing
