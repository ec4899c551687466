#include "engine/request_group.h"

#include <algorithm>

#include "base/check.h"
#include "engine/request.h"

namespace allspark {

RequestGroup::RequestGroup(Request* first, std::vector<std::shared_ptr<Request>> others,
                           const GenerationConfig& config, int64_t vocab_size)
    : others_(std::move(others)),
      num_returned_(config.num_return_sequences),
      length_penalty_(config.length_penalty) {
  members_.push_back(first);
  for (const auto& other : others_) members_.push_back(other.get());
  const RequestSpec& spec = first->spec;
  const int64_t max_output = spec.max_length - spec.prompt_length;
  const auto reserve = [&](OutputLogprobs& logprobs) {
    if (spec.logprobs.wanted) logprobs.Reserve(max_output, spec.logprobs.num_top);
  };
  outputs_.resize(members_.size());
  for (Output& output : outputs_) {
    output.tokens.reserve(static_cast<size_t>(max_output));
    reserve(output.logprobs);
  }
  for (Request* member : members_) {
    member->group = this;
    reserve(member->output_logprobs);
  }
  if (config.num_beams == 1) return;
  histories_.resize(members_.size());
  for (TextState& history : histories_) {
    history.Reserve(spec, vocab_size);
    reserve(history.output_logprobs);
  }
  ReserveSearch(config, vocab_size);
}

void RequestGroup::ReserveSearch(const GenerationConfig& config, int64_t vocab_size) {
  Request* const first = members_.front();
  const auto num_ends =
      static_cast<int64_t>(first->spec.ends.tokens.size()) + first->spec.ends.num_word_endings;
  const int64_t num_candidates = std::min(config.num_beams + num_ends, vocab_size);
  search_ = std::make_unique<BeamSearch>(
      BeamSearchParams{.num_beams = config.num_beams,
                       .num_candidates = num_candidates,
                       .max_output = first->max_length - first->spec.prompt_length,
                       .length_penalty = config.length_penalty,
                       .stop = config.beam_early_stopping});
  rows_.reserve(members_.size());
  parents_.reserve(members_.size());
  for (Request* member : members_) {
    sequences_.push_back(member);
    member->candidates.top.resize(static_cast<size_t>(num_candidates));
    member->candidates.reported.resize(static_cast<size_t>(num_candidates));
    if (member == first) continue;
    sequences_[sequences_.size() - 2]->next_beam = member;
    member->num_tokens = 0;
    member->token_ids = nullptr;  // the scheduler knows what beams share
  }
}

std::span<Request* const> RequestGroup::returned() const {
  return std::span(members_).first(static_cast<size_t>(num_returned_));
}

int64_t RequestGroup::longest_output() const {
  int64_t longest = 0;
  for (const Request* member : members_) {
    longest = std::max(longest, member->num_tokens - member->spec.prompt_length);
  }
  for (const Output& output : outputs_) {
    longest = std::max(longest, static_cast<int64_t>(output.tokens.size()));
  }
  return longest;
}

FinishReason RequestGroup::best_reason() const {
  const auto end = outputs_.begin() + static_cast<int64_t>(num_outputs());
  return std::max_element(outputs_.begin(), end, IsWorse)->reason;
}

void RequestGroup::KeepSample(const Request* sample, FinishReason reason) {
  const auto index = std::find(members_.begin(), members_.end(), sample) - members_.begin();
  Output& output = outputs_[static_cast<size_t>(index)];
  output.tokens.assign(sample->tokens.begin() + sample->spec.prompt_length, sample->tokens.end());
  output.logprobs = sample->output_logprobs;
  output.score = SequenceScore(sample->sum_logprobs, static_cast<int64_t>(output.tokens.size()),
                               length_penalty_);
  output.reason = reason;
  ++num_ended_;
}

bool RequestGroup::TakeCandidates(Request* beam) {
  // After a preemption all beams are computed again, perhaps in other steps than before.
  if (num_preemptions_ != first()->num_preemptions) {
    num_preemptions_ = first()->num_preemptions;
    for (Request* member : members_) member->has_candidates = false;
  }
  beam->has_candidates = true;
  return std::all_of(members_.begin(), members_.end(), [](const Request* member) {
    return member->num_tokens == 0 || member->has_candidates;
  });
}

void RequestGroup::Choose() {
  rows_.clear();
  for (Request* member : members_) {
    if (member->num_tokens > 0) rows_.push_back(&member->candidates);
    member->has_candidates = false;
  }
  search_->Advance(rows_, [this](size_t beam, int32_t token) {
    return members_[beam]->ReasonAfter(token) != FinishReason::kNone;
  });
  for (const BeamChoice& choice : search_->ended()) KeepEnded(choice);
  parents_.clear();
  for (const BeamChoice& choice : search_->beams()) parents_.push_back(choice.parent);
}

void RequestGroup::KeepEnded(const BeamChoice& choice) {
  Request* const parent = members_[static_cast<size_t>(choice.parent)];
  Output& output = outputs_[choice.place];
  output.tokens.assign(parent->tokens.begin() + parent->spec.prompt_length, parent->tokens.end());
  output.tokens.push_back(choice.token);
  if (parent->spec.logprobs.wanted) {
    output.logprobs = parent->output_logprobs;
    output.logprobs.Add(choice.reported, parent->logprobs.top);
  }
  output.score = search_->scores()[choice.place];
  output.reason = parent->ReasonAfter(choice.token);
}

void RequestGroup::Continue() {
  for (size_t i = 0; i < members_.size(); ++i) {
    std::swap(histories_[i], members_[i]->text());
  }
  for (size_t i = 0; i < search_->beams().size(); ++i) {
    const BeamChoice& choice = search_->beams()[i];
    const auto parent = static_cast<size_t>(choice.parent);
    Request* const beam = members_[i];
    beam->text() = histories_[parent];
    if (i == 0) beam->token_ids = beam->tokens.data();
    if (beam->spec.logprobs.wanted) {
      beam->output_logprobs.Add(choice.reported, members_[parent]->logprobs.top);
    }
    const FinishReason reason = beam->Append(choice.token);
    AS_CHECK(reason == FinishReason::kNone) << "a beam goes on that has ended";
  }
}

void RequestGroup::Finish(FinishReason reason, const std::string& error, int64_t now_us) {
  for (Request* member : members_) member->ReleaseResources();
  if (IsOutput(reason)) RankOutputs();
  // The first queue is last: a caller that waits for the request waits for this queue.
  for (size_t rank = returned().size(); rank-- > 0;) {
    ResultQueueImpl& queue = *returned()[rank]->queue;
    if (IsOutput(reason)) {
      const Output& output = outputs_[rank];
      queue.AppendRanked(output.tokens, output.logprobs, output.score, now_us);
      queue.Finish(output.reason, "", now_us);
    } else {
      queue.Finish(reason, error, now_us);
    }
  }
  std::vector<Output>().swap(outputs_);
  std::vector<TextState>().swap(histories_);
}

// Moves the best outputs to the front; equal ones stay in order.
void RequestGroup::RankOutputs() {
  const auto end = outputs_.begin() + static_cast<int64_t>(num_outputs());
  for (auto front = outputs_.begin(); front < end; ++front) {
    const auto best = std::max_element(front, end, IsWorse);
    std::rotate(front, best, best + 1);
  }
}

}  // namespace allspark
