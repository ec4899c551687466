// Decides what each step computes: admission, chunked prefill, decode, preemption. Pure logic over block
// ids: no tensor, no clock, no thread. The step thread owns it. After construction nothing allocates:
// sequences are the caller's objects, linked intrusively.
//
// Policy. Every running sequence that has only its newest token to compute (a decode) is in every step. What is
// left of the step's prefill budget (chunk_tokens) goes to sequences with more to compute, in order of (priority,
// arrival). When blocks run out, the youngest sequence of the lowest priority gives back its blocks and waits
// again, at its old place in the queue; its tokens, generated ones included, are recomputed later.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_cache/block_pool.h"

namespace allspark {

// The scheduler's view of one sequence. The owner reserves block_table for its longest length and keeps
// num_tokens up to date (prompt + generated).
struct ScheduledSequence {
  // Set by the owner before Add.
  int64_t id = 0;
  int64_t priority = 0;         // larger runs earlier
  int64_t num_tokens = 0;       // known tokens: prompt + generated
  int64_t max_length = 0;       // num_tokens never exceeds this
  std::vector<int32_t> block_table;  // capacity reserved for ceil(max_length / block_size)

  // The scheduler's.
  int64_t arrival = 0;
  int64_t num_computed = 0;     // tokens whose KV is in the cache
  int64_t num_preemptions = 0;
  enum class State : int { kNone, kWaiting, kRunning } state = State::kNone;
  ScheduledSequence* prev = nullptr;
  ScheduledSequence* next = nullptr;
};

struct SchedulerConfig {
  int64_t max_batch = 32;       // running sequences
  int64_t chunk_tokens = 512;   // prefill tokens per step
  int64_t block_size = 32;
  int64_t num_blocks = 0;
};

// One sequence's part of a step: compute tokens [begin, begin + num_tokens).
struct PlannedChunk {
  ScheduledSequence* sequence;
  int64_t begin;
  int64_t num_tokens;
  bool samples;                 // reaches the newest known token: its logits are wanted
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);

  // Queues a new sequence behind those of the same priority.
  void Add(ScheduledSequence* sequence);
  // Takes it out in any state and frees its blocks.
  void Remove(ScheduledSequence* sequence);
  // The next step; blocks for it are taken. Empty when nothing can run. Valid until the next call. Decodes come
  // first, then prefill chunks.
  const std::vector<PlannedChunk>& Plan();
  // The planned step was computed: moves num_computed. Call before the owner appends sampled tokens.
  void Commit();

  int64_t num_waiting() const { return num_waiting_; }
  int64_t num_running() const { return num_running_; }
  int64_t num_preemptions() const { return num_preemptions_; }
  const BlockPool& pool() const { return pool_; }
  const SchedulerConfig& config() const { return config_; }
  // Waiting then running sequences in their order, for inspection by tests and for ending all.
  ScheduledSequence* first_waiting() const { return waiting_head_; }
  ScheduledSequence* first_running() const { return running_head_; }

 private:
  // Links, splicing and preemption helpers are in the .cc file's discretion.
  SchedulerConfig config_;
  BlockPool pool_;
  std::vector<PlannedChunk> plan_;
  ScheduledSequence* waiting_head_ = nullptr;
  ScheduledSequence* waiting_tail_ = nullptr;
  ScheduledSequence* running_head_ = nullptr;
  ScheduledSequence* running_tail_ = nullptr;
  int64_t num_waiting_ = 0;
  int64_t num_running_ = 0;
  int64_t num_preemptions_ = 0;
  int64_t next_arrival_ = 0;
};

}  // namespace allspark
