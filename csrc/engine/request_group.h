// Sequences of one prompt that are returned ranked once all have ended: the beams of a search, or
// the samples of best_of. In a step each is a request of its own; the first of them owns the group
// and represents it to the caller. All memory is allocated on the caller's thread; then the group
// is the step thread's.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allspark/config.h"
#include "allspark/result_queue.h"
#include "engine/text_state.h"
#include "sampling/beam_search.h"
#include "scheduler/scheduler.h"

namespace allspark {

struct Request;

class RequestGroup {
 public:
  // `first`: the caller's request. `others` are made like it, and are the group's from now on.
  RequestGroup(Request* first, std::vector<std::shared_ptr<Request>> others,
               const GenerationConfig& config, int64_t vocab_size);

  bool is_search() const { return search_ != nullptr; }
  Request* first() const { return members_.front(); }
  std::span<Request* const> members() const { return members_; }
  // The members whose queues the caller has; the first of these queues gets the best sequence.
  std::span<Request* const> returned() const;
  // How many requests count as live: 1 for a search, otherwise the samples that have not ended.
  int64_t num_live() const { return is_search() ? 1 : size() - num_ended_; }

  // Tokens of the longest sequence so far.
  int64_t longest_output() const;
  // Why the best output ended, once all have ended well.
  FinishReason best_reason() const;

  // Samples: keeps the output of one that ended.
  void KeepSample(const Request* sample, FinishReason reason);
  bool all_ended() const { return num_ended_ == size(); }

  // A search: notes that a beam has its candidates; true once every beam has.
  bool TakeCandidates(Request* beam);
  // Chooses the next beams. Unless the search is_done() then, the caller gives sequences() and
  // parents() to Scheduler::Fork, and Continue() gives the beams their tokens.
  void Choose();
  bool is_done() const { return search_->done(); }
  // Whether at least as many sequences have ended as are returned.
  bool has_enough() const { return search_->scores().size() >= returned().size(); }
  std::span<const int32_t> parents() const { return parents_; }
  std::span<ScheduledSequence* const> sequences() const { return sequences_; }
  void Continue();

  // Ends the group: the queues get the best outputs if all ended well, otherwise the reason.
  void Finish(FinishReason reason, const std::string& error, int64_t now_us);

 private:
  struct Output {
    std::vector<int32_t> tokens;
    OutputLogprobs logprobs;
    double score = 0;
    FinishReason reason = FinishReason::kNone;
  };
  static bool IsWorse(const Output& a, const Output& b) { return a.score < b.score; }

  int64_t size() const { return static_cast<int64_t>(members_.size()); }
  void ReserveSearch(const GenerationConfig& config, int64_t vocab_size);
  void KeepEnded(const BeamChoice& choice);
  size_t num_outputs() const { return is_search() ? search_->scores().size() : outputs_.size(); }
  void RankOutputs();

  std::vector<std::shared_ptr<Request>> others_;
  std::vector<Request*> members_;
  int64_t num_returned_;
  double length_penalty_;
  std::vector<Output> outputs_;  // of samples by member, of beams by place
  int64_t num_ended_ = 0;
  // Of a search.
  std::unique_ptr<BeamSearch> search_;
  std::vector<ScheduledSequence*> sequences_;
  std::vector<const RowCandidates*> rows_;
  std::vector<int32_t> parents_;
  int64_t num_preemptions_ = 0;       // when the first of the present candidates were taken
  std::vector<TextState> histories_;  // what the beams pass to those that continue them
};

}  // namespace allspark
