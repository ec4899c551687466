// A scheduler with test sequences and an executor that fakes the model. The executor records which
// token, after which prefix, was written to each slot of the cache. So a block in two tables, a
// token that was not recomputed, or a block of another prefix is detected by the next step that
// reads it. The Check functions state the invariants.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/scheduler.h"

namespace allspark::testing {

struct TestSequence : ScheduledSequence {
  int64_t last_planned_step = -1;
  int64_t num_offered = 0;         // drafts before the plan
  int64_t num_accepted = 0;        // drafts of the current step that are accepted
  bool was_decode = false;         // before the current step was planned
  int64_t running_since = -1;      // num_preemptions if it ran then, else -1
  std::vector<int32_t> tokens;     // known tokens and accepted drafts; never reallocated
  std::vector<uint64_t> contents;  // expected cache content: hash of a token and its prefix
  TestSequence* first_beam = this;
  // The beams of a search, itself first; empty: no search.
  std::vector<ScheduledSequence*> beams;
  std::vector<std::unique_ptr<TestSequence>> other_beams;

  void Append(int32_t token) {
    const uint64_t before = contents.empty() ? cache_salt + 1 : contents.back();
    tokens.push_back(token);
    contents.push_back((before ^ static_cast<uint64_t>(token)) * 0x9E3779B97F4A7C15 + 1);
  }
};

class Harness {
 public:
  // `trace`: receives events in the format that tests/python/scheduler_oracle.py reads; may be
  // null.
  explicit Harness(const SchedulerConfig& config, std::ostream* trace = nullptr)
      : scheduler_(config),
        slots_(static_cast<size_t>(config.num_blocks * config.block_size)),
        trace_(trace) {}

  Scheduler& scheduler() { return scheduler_; }
  const std::vector<PlannedChunk>& plan() const { return *plan_; }
  std::vector<std::unique_ptr<TestSequence>>& sequences() { return sequences_; }
  // The first broken invariant; empty: none.
  const std::string& error() const { return error_; }

  // The ids of the sequences interrupted so far, for lack of blocks.
  const std::vector<int64_t>& interrupted() const { return interrupted_; }
  // Tokens that plans took from the prefix cache.
  int64_t num_hit_tokens() const { return num_hit_tokens_; }

  // Sets how many of a chunk's drafts are accepted.
  void set_accept(std::function<int64_t(const PlannedChunk&)> accept) {
    accept_ = std::move(accept);
  }

  // Sets how many of a chunk's drafts its owner keeps.
  void set_trim(std::function<int64_t(const PlannedChunk&)> trim) { trim_ = std::move(trim); }
  // Sets the time of the steps that follow.
  void set_now(int64_t now_us) {
    now_us_ = now_us;
    if (trace_ != nullptr) *trace_ << "now " << now_us << "\n";
  }
  // Sets the next token of a sequence. By default a token that no other sequence has.
  void set_next_token(std::function<int32_t(const TestSequence&)> next_token) {
    next_token_ = std::move(next_token);
  }

  // Adds a sequence with tokens that no other sequence has.
  TestSequence* Add(int64_t priority, int64_t num_tokens, int64_t max_length) {
    std::vector<int32_t> prompt(static_cast<size_t>(num_tokens));
    for (int32_t& token : prompt) token = fresh_token_++;
    return Add(priority, prompt, max_length);
  }
  TestSequence* Add(int64_t priority, const std::vector<int32_t>& prompt, int64_t max_length,
                    uint64_t salt = 0) {
    auto sequence = std::make_unique<TestSequence>();
    const int64_t block_size = scheduler_.config().block_size;
    sequence->id = next_id_++;
    sequence->priority = priority;
    sequence->num_tokens = static_cast<int64_t>(prompt.size());
    sequence->max_length = max_length;
    sequence->cache_salt = salt;
    sequence->tokens.reserve(static_cast<size_t>(max_length));
    for (const int32_t token : prompt) sequence->Append(token);
    sequence->token_ids = sequence->tokens.data();
    sequence->block_table.reserve(static_cast<size_t>((max_length + block_size - 1) / block_size));
    scheduler_.Add(sequence.get());
    if (trace_ != nullptr) {
      *trace_ << "add " << sequence->id << " priority " << priority << " max_length " << max_length
              << " tokens";
      for (const int32_t token : prompt) *trace_ << " " << token;
      *trace_ << "\n";
    }
    sequences_.push_back(std::move(sequence));
    return sequences_.back().get();
  }

  // Adds a beam search with num_beams beams.
  TestSequence* AddBeams(int64_t priority, const std::vector<int32_t>& prompt, int64_t max_length,
                         int64_t num_beams) {
    auto first = std::make_unique<TestSequence>();
    const int64_t block_size = scheduler_.config().block_size;
    first->id = next_id_++;
    first->num_tokens = static_cast<int64_t>(prompt.size());
    ScheduledSequence* last = nullptr;
    for (int64_t i = 0; i < num_beams; ++i) {
      TestSequence* beam = first.get();
      if (i > 0) {
        beam = first->other_beams.emplace_back(std::make_unique<TestSequence>()).get();
        beam->first_beam = first.get();
        last->next_beam = beam;
      }
      beam->priority = priority;
      beam->max_length = max_length;
      beam->tokens.reserve(static_cast<size_t>(max_length));
      beam->block_table.reserve(static_cast<size_t>((max_length + block_size - 1) / block_size));
      first->beams.push_back(beam);
      last = beam;
    }
    for (const int32_t token : prompt) first->Append(token);
    first->token_ids = first->tokens.data();
    scheduler_.Add(first.get());
    sequences_.push_back(std::move(first));
    return sequences_.back().get();
  }

  // Sets which beams the next beams of a search continue; their number is the next number of beams.
  void set_parents(std::function<std::vector<int32_t>(const TestSequence&)> parents) {
    parents_ = std::move(parents);
  }

  void Remove(TestSequence* sequence) {
    scheduler_.Remove(sequence);
    for (const ScheduledSequence* beam : sequence->beams) {
      Check(beam->block_table.empty() && beam->state == ScheduledSequence::State::kNone,
            "a beam was left");
    }
    if (trace_ != nullptr) *trace_ << "remove " << sequence->id << "\n";
    Forget(sequence);
  }

  // Plans, computes and commits one step; appends a token where the plan samples. `ends(sequence)`
  // says whether a sequence ends with the token that it got (at max_length it always ends). Returns
  // false once an invariant is broken.
  template <typename Ends>
  bool Step(Ends&& ends) {
    Plan();
    return Finish(ends);
  }
  bool Step() {
    return Step([](const TestSequence&) { return false; });
  }

  // Plans a step and checks the plan. plan() may be read until Finish removes the ended sequences.
  void Plan() {
    ++step_;
    for (const auto& sequence : sequences_) {
      sequence->num_offered = sequence->num_drafts;
      sequence->was_decode = sequence->decodes();
      const bool runs = sequence->state == ScheduledSequence::State::kRunning;
      sequence->running_since = runs ? sequence->num_preemptions : -1;
    }
    plan_ = &scheduler_.Plan(now_us_);
    if (trace_ != nullptr) WriteTrace();
    for (ScheduledSequence* sequence : scheduler_.interrupted()) {
      Check(sequence->state == ScheduledSequence::State::kNone, "interrupted but still there");
      interrupted_.push_back(sequence->id);
      Forget(sequence);
    }
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
    steps_without_decodes_ = decodes_wait_ ? steps_without_decodes_ + 1 : 0;
    if (trace_ != nullptr) *trace_ << "commit\n";
    ended_.clear();
    for (const PlannedChunk& chunk : *plan_) {
      auto* sequence = static_cast<TestSequence*>(chunk.sequence);
      Check(sequence->num_computed == chunk.begin + chunk.num_tokens - chunk.num_drafts,
            "Commit did not count");
      if (!chunk.samples || !sequence->first_beam->beams.empty()) continue;
      if (holds_ && holds_(*sequence)) {
        scheduler_.Hold(sequence);
        continue;
      }
      for (int64_t i = 0; i < sequence->num_accepted; ++i) {
        ++sequence->num_tokens;
        scheduler_.AcceptDraft(sequence);
      }
      const bool full = sequence->num_tokens == sequence->max_length;
      if (!full) {
        AppendTo(sequence);
        ++sequence->num_tokens;
      }
      // As in the engine, a sequence ends when it reaches max_length; a prompt of that length ends
      // at once.
      if (full || sequence->num_tokens == sequence->max_length || ends(*sequence)) {
        ended_.push_back(sequence);
      }
    }
    for (const auto& sequence : sequences_) {
      if (!IsComputed(*sequence)) continue;
      if (sequence->num_tokens + 1 >= sequence->max_length || ends(*sequence)) {
        ended_.push_back(sequence.get());
      } else {
        Fork(*sequence, parents_(*sequence));
      }
    }
    for (TestSequence* sequence : ended_) Remove(sequence);
    return error_.empty();
  }

  // Sets whether the owner holds a sequence instead of appending a token.
  void set_holds(std::function<bool(const TestSequence&)> holds) { holds_ = std::move(holds); }

  // A step that fails: it is planned but not computed, and all its sequences are removed.
  bool FailStep() {
    Plan();
    ended_.clear();
    for (const PlannedChunk& chunk : *plan_) {
      TestSequence* const first = static_cast<TestSequence*>(chunk.sequence)->first_beam;
      if (std::find(ended_.begin(), ended_.end(), first) == ended_.end()) ended_.push_back(first);
    }
    for (TestSequence* sequence : ended_) Remove(sequence);
    return error_.empty();
  }

 private:
  void Check(bool condition, const char* what) {
    if (condition || !error_.empty()) return;
    error_ = std::string(what) + " in step " + std::to_string(step_);
  }

  // Deletes a sequence that has left the scheduler.
  void Forget(const ScheduledSequence* sequence) {
    Check(sequence->block_table.empty() && sequence->num_computed == 0, "removed but not reset");
    std::erase_if(sequences_, [&](const auto& owned) { return owned.get() == sequence; });
  }

  // Whether every beam of a search is computed.
  static bool IsComputed(const TestSequence& sequence) {
    return !sequence.beams.empty() && sequence.state == ScheduledSequence::State::kRunning &&
           std::all_of(sequence.beams.begin(), sequence.beams.end(),
                       [](const auto* beam) { return beam->num_computed == beam->num_tokens; });
  }

  // The search continues with beams that extend `parents` by one token.
  void Fork(TestSequence& search, const std::vector<int32_t>& parents) {
    std::vector<std::pair<std::vector<int32_t>, std::vector<uint64_t>>> histories;
    for (const ScheduledSequence* beam : search.beams) {
      const auto& test = static_cast<const TestSequence&>(*beam);
      histories.emplace_back(test.tokens, test.contents);
    }
    for (const BlockCopy& copy : scheduler_.Fork(search.beams, parents)) {
      const int64_t size = scheduler_.config().block_size;
      std::copy_n(slots_.begin() + copy.from * size, size, slots_.begin() + copy.to * size);
    }
    for (size_t i = 0; i < search.beams.size(); ++i) {
      auto& beam = static_cast<TestSequence&>(*search.beams[i]);
      Check((beam.num_tokens > 0) == (i < parents.size()), "a beam too many or too few");
      if (i >= parents.size()) continue;
      const auto& history = histories[static_cast<size_t>(parents[i])];
      beam.tokens = history.first;
      beam.contents = history.second;
      AppendTo(&beam);
      ++beam.num_tokens;
    }
    CheckPool();
  }

  template <typename Function>
  void ForEachBeam(Function function) const {
    for (const auto& sequence : sequences_) {
      for (const ScheduledSequence* beam = sequence.get(); beam != nullptr;
           beam = beam->next_beam) {
        function(*beam);
      }
    }
  }

  void AppendTo(TestSequence* sequence) {
    const int32_t token = next_token_ ? next_token_(*sequence) : fresh_token_++;
    sequence->Append(token);
    if (trace_ != nullptr) *trace_ << "append " << sequence->id << " " << token << "\n";
  }

  static bool Precedes(const ScheduledSequence& a, const ScheduledSequence& b) {
    return a.priority > b.priority || (a.priority == b.priority && a.arrival < b.arrival);
  }

  void CheckPool() {
    const PrefixCache& cache = scheduler_.prefix_cache();
    const BlockPool& pool = scheduler_.pool();
    const int64_t block_size = scheduler_.config().block_size;
    references_.assign(static_cast<size_t>(pool.num_blocks()), 0);
    writers_.assign(references_.size(), 0);
    ForEachBeam([&](const ScheduledSequence& sequence) {
      // The first plan_begin tokens are computed already, or by other sequences' chunks.
      const int64_t writes_from = std::max(sequence.num_computed, sequence.plan_begin);
      for (size_t i = 0; i < sequence.block_table.size(); ++i) {
        const auto block = static_cast<size_t>(sequence.block_table[i]);
        ++references_[block];
        if (static_cast<int64_t>(i + 1) * block_size > writes_from) ++writers_[block];
      }
    });
    int64_t used = 0;
    for (int32_t block = 0; block < pool.num_blocks(); ++block) {
      const int32_t tables = references_[static_cast<size_t>(block)];
      Check(writers_[static_cast<size_t>(block)] <= 1, "a block in two writable tables");
      Check(cache.IsInUse(block) == (tables > 0), "in use differs from the table entries");
      const int32_t indexed = pool.reference_count(block) - tables;
      Check(indexed == 0 || (indexed == 1 && scheduler_.config().enable_prefix_cache),
            "a reference count differs from the table entries");
      if (tables > 0) ++used;
    }
    Check(cache.num_available() + used == pool.num_blocks(), "available + used differs from all");
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
    const int64_t block_size = scheduler_.config().block_size;
    int64_t rows = 0;
    ForEachBeam([&](const ScheduledSequence& s) {
      const auto capacity = static_cast<int64_t>(s.block_table.size()) * block_size;
      if (s.state == ScheduledSequence::State::kWaiting) {
        Check(capacity == 0 && s.num_computed == 0, "a waiting sequence has blocks");
      } else {
        // Drafts may have taken the next block already.
        const int64_t most_ahead = scheduler_.config().max_draft_rows > 0 ? 2 : 1;
        Check(capacity >= std::max(s.num_computed, s.plan_begin) &&
                  capacity < s.num_tokens + most_ahead * block_size,
              "too few or too many blocks");
        ++rows;
      }
    });
    Check(rows <= scheduler_.config().max_batch, "more run than max_batch");
  }

  void CheckPlan() {
    const SchedulerConfig& config = scheduler_.config();
    int64_t prefill = 0, rows = 0, drafts = 0;
    bool after_prefill = false, has_decodes = false;
    for (const PlannedChunk& chunk : *plan_) {
      auto* s = static_cast<TestSequence*>(chunk.sequence);
      Check(s->state == ScheduledSequence::State::kRunning, "planned but not running");
      Check(!s->held, "planned but held");
      Check(s->last_planned_step != step_, "planned twice");
      s->last_planned_step = step_;
      Check(chunk.begin >= s->num_computed && chunk.num_tokens >= 1, "planned from elsewhere");
      Check(chunk.begin == s->num_computed || (chunk.begin % config.block_size == 0 &&
                                               config.enable_prefix_cache && !s->was_decode),
            "tokens were left out");
      num_hit_tokens_ += chunk.begin - s->num_computed;
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
      const bool ran = s->first_beam->running_since == s->first_beam->num_preemptions;
      const bool decode = ran && s->first_beam->was_decode;
      Check(!decode || !after_prefill, "a decode after a prefill");
      after_prefill |= !decode;
      has_decodes |= decode;
      if (!decode) prefill += chunk.num_tokens;
      rows += chunk.num_tokens;
      // A sequence that was just admitted must not have overtaken a waiting one.
      Check(ran || s->first_beam != s || scheduler_.first_waiting() == nullptr ||
                Precedes(*s, *scheduler_.first_waiting()),
            "admitted past the head of the line");
    }
    Check(prefill <= config.chunk_tokens, "more prefill than chunk_tokens");
    const int64_t beside = config.max_rows_beside_decodes;
    Check(rows == prefill || prefill <= std::max(beside - (rows - prefill), (beside + 1) / 2),
          "more prefill than decodes allow");
    Check(rows <= std::max(config.max_batch + config.chunk_tokens, config.max_draft_rows),
          "more rows than promised");
    Check(drafts == 0 || (prefill == 0 && rows <= config.max_draft_rows), "too many drafts");
    // Whether a decode may be left out: prefill goes first.
    const bool may_wait =
        prefill > 0 && !has_decodes && steps_without_decodes_ < config.max_steps_without_decodes;
    decodes_wait_ = false;
    for (const ScheduledSequence* s = scheduler_.first_running(); s != nullptr; s = s->next) {
      const bool in_step = static_cast<const TestSequence*>(s)->last_planned_step == step_;
      const bool waits = may_wait && !in_step && !s->held && s->decodes();
      decodes_wait_ |= waits;
      const bool planned = s->held || in_step || waits;
      Check(planned || !s->decodes(), "a running decode is not in the step");
      Check(planned || s != scheduler_.first_running() || s->next_beam != nullptr,
            "the first in line is not in the step");
    }
  }

  // Writes what the step computes, then reads what attention would read.
  void Execute() {
    for (const PlannedChunk& chunk : *plan_) {
      auto& sequence = static_cast<TestSequence&>(*chunk.sequence);
      sequence.num_accepted = accept_ ? accept_(chunk) : 0;
      for (int64_t i = 0; i < sequence.num_accepted; ++i) AppendTo(&sequence);
      for (int64_t i = 0; i < chunk.num_tokens; ++i) {
        const auto position = static_cast<size_t>(chunk.begin + i);
        Slot(sequence, chunk.begin + i) =
            position < sequence.contents.size() ? sequence.contents[position] : 0;
      }
    }
    for (const PlannedChunk& chunk : *plan_) {
      const auto& sequence = static_cast<const TestSequence&>(*chunk.sequence);
      for (int64_t position = 0; position < chunk.begin; ++position) {
        Check(Slot(sequence, position) == sequence.contents[static_cast<size_t>(position)],
              "the cache holds another token than the sequence's");
      }
    }
  }

  uint64_t& Slot(const ScheduledSequence& sequence, int64_t position) {
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
    *trace_ << "\nstate available " << scheduler_.prefix_cache().num_available() << " unused "
            << scheduler_.prefix_cache().num_unused() << " preempted "
            << scheduler_.num_preemptions() << " waiting";
    for (auto* s = scheduler_.first_waiting(); s != nullptr; s = s->next) *trace_ << " " << s->id;
    *trace_ << " running";
    for (auto* s = scheduler_.first_running(); s != nullptr; s = s->next) *trace_ << " " << s->id;
    if (!scheduler_.interrupted().empty()) *trace_ << " interrupted";
    for (const ScheduledSequence* s : scheduler_.interrupted()) *trace_ << " " << s->id;
    *trace_ << "\n";
  }

  Scheduler scheduler_;
  std::function<int64_t(const PlannedChunk&)> accept_;
  std::function<int64_t(const PlannedChunk&)> trim_;
  std::function<int32_t(const TestSequence&)> next_token_;
  std::function<bool(const TestSequence&)> holds_;
  std::function<std::vector<int32_t>(const TestSequence&)> parents_;
  std::vector<std::unique_ptr<TestSequence>> sequences_;
  std::vector<uint64_t> slots_;  // the last content written
  std::ostream* trace_;
  const std::vector<PlannedChunk>* plan_ = nullptr;
  std::vector<TestSequence*> ended_;
  std::vector<int64_t> interrupted_;
  std::vector<int32_t> references_, writers_;
  std::string error_;
  int64_t num_hit_tokens_ = 0;
  int64_t next_id_ = 0;
  int64_t now_us_ = 0;
  int32_t fresh_token_ = 1000;
  int64_t step_ = 0;
  bool decodes_wait_ = false;          // in this step
  int64_t steps_without_decodes_ = 0;  // before it, in a row
};

// "id:begin+count", with * where it samples.
inline std::string ToString(const std::vector<PlannedChunk>& plan) {
  std::ostringstream text;
  for (const PlannedChunk& chunk : plan) {
    if (&chunk != plan.data()) text << " ";
    text << chunk.sequence->id << ":" << chunk.begin << "+" << chunk.num_tokens
         << (chunk.samples ? "*" : "");
  }
  return text.str();
}

// Runs a step in which no sequence ends, and returns its plan as text.
inline std::string Step(Harness& harness) {
  harness.Plan();
  const std::string plan = ToString(harness.plan());
  EXPECT_TRUE(harness.Finish([](const TestSequence&) { return false; })) << harness.error();
  return plan;
}

}  // namespace allspark::testing
