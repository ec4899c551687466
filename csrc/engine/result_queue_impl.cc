#include "engine/result_queue_impl.h"

#include <algorithm>
#include <chrono>
#include <span>

#include "base/check.h"
#include "base/clock.h"
#include "engine/error_text.h"

namespace allspark {

ResultQueueImpl::ResultQueueImpl(uint64_t request_id, int64_t prompt_tokens,
                                 const QueueCapacity& capacity,
                                 std::shared_ptr<CompletionSetImpl> engine_set,
                                 std::shared_ptr<const OutputTensors> outputs)
    : request_id_(request_id),
      prompt_tokens_(prompt_tokens),
      capacity_(capacity),
      engine_set_(std::move(engine_set)),
      arrival_us_(SteadyNowUs()),
      outputs_(std::move(outputs)) {
  tokens_.reserve(static_cast<size_t>(capacity.tokens));
  if (capacity.logprobs) output_logprobs_.Reserve(capacity.tokens, capacity.top_logprobs);
  if (capacity.prompt_logprobs) {
    const int64_t count = prompt_tokens - 1 - capacity.scored_begin;
    prompt_logprobs_.chosen.resize(static_cast<size_t>(count));
    prompt_logprobs_.top.resize(static_cast<size_t>(count * capacity.top_logprobs));
  }
  engine_hook_.queue = this;
  attached_hook_.queue = this;
}

ResultQueueImpl::~ResultQueueImpl() {
  engine_set_->Unlink(engine_hook_);
  if (attached_set_ != nullptr) attached_set_->Unlink(attached_hook_);
}

void ResultQueueImpl::Delete(ResultQueueImpl* queue) {
  if (queue->home_.IsHere()) delete queue;
}

GenerateRequestStatus ResultQueueImpl::GenerateStatus() const {
  if (!home_.IsHere()) return GenerateRequestStatus::kInternalError;
  MutexLock lock(mutex_);
  return status_;
}

FinishReason ResultQueueImpl::finish_reason() const {
  if (!home_.IsHere()) return FinishReason::kError;
  MutexLock lock(mutex_);
  return reason_;
}

size_t ResultQueueImpl::GeneratedLength() const {
  if (!home_.IsHere()) return 0;
  MutexLock lock(mutex_);
  return tokens_.size();
}

std::string ResultQueueImpl::error() const {
  if (!home_.IsHere()) return home_.Check("queue's engine").message();
  MutexLock lock(mutex_);
  // The step thread gives no text: that would take memory from the heap.
  if (reason_ == FinishReason::kInterrupted && error_.empty()) {
    return "the KV cache ran full, and interrupt_on_cache_exhaustion is true";
  }
  return error_;
}

std::optional<double> ResultQueueImpl::sequence_score() const {
  if (!home_.IsHere()) return std::nullopt;
  MutexLock lock(mutex_);
  return score_;
}

std::map<std::string, int64_t> ResultQueueImpl::RequestStatInfo() const {
  if (!home_.IsHere()) return {};
  MutexLock lock(mutex_);
  const auto ms = [](int64_t us) { return us / 1000; };
  const auto since = [](int64_t from, int64_t to) { return to > from ? (to - from) / 1000 : 0; };
  const auto per_second = [](int64_t count, int64_t us) {
    return us > 0 ? count * 1000000 / us : 0;
  };
  const int64_t generated = static_cast<int64_t>(tokens_.size());
  const int64_t last_us = finished_us_ != 0 ? finished_us_ : last_token_us_;
  // A request that still waits has waited until now; one that never ran, until its end.
  const int64_t waited_until_us = scheduled_us_ != 0  ? scheduled_us_
                                  : finished_us_ != 0 ? finished_us_
                                                      : SteadyNowUs();
  // Prefill ends with the first token; a prompt_only request has none, so with its end.
  const bool is_prompt_done = generated == 0 && reason_ == FinishReason::kLength;
  const int64_t prefilled_us = is_prompt_done ? finished_us_ : first_token_us_;
  return {
      {"arrival_time", ms(arrival_us_)},
      {"first_token_time", ms(first_token_us_)},
      {"last_token_time", ms(last_token_us_)},
      {"time_to_first_token", since(arrival_us_, first_token_us_)},
      {"time_in_queue", since(arrival_us_, waited_until_us)},
      {"finished_time", scheduled_us_ == 0 ? 0 : since(scheduled_us_, last_us)},
      {"context_token_length", prompt_tokens_},
      {"generated_token_length", generated},
      {"context_cached_length", cached_},
      {"context_tps",
       prefilled_us == 0 ? 0 : per_second(prompt_tokens_, prefilled_us - scheduled_us_)},
      // The first token comes out of the prefill; only those after it took decode time.
      {"generate_tps",
       generated < 2 ? 0 : per_second(generated - 1, last_token_us_ - first_token_us_)},
      {"draft_token_length", drafted_},
      {"accepted_draft_token_length", accepted_},
  };
}

int64_t ResultQueueImpl::NumPositionsLocked() const {
  if (!tokens_.empty()) return prompt_tokens_ + static_cast<int64_t>(tokens_.size()) - 1;
  // Without tokens, kLength means that the prompt of a prompt_only request is computed.
  return reason_ == FinishReason::kLength ? prompt_tokens_ : 0;
}

std::optional<GeneratedElements> ResultQueueImpl::TakeLocked() {
  const int64_t num_positions = NumPositionsLocked();
  if (delivered_positions_ == num_positions) return std::nullopt;
  GeneratedElements elements;
  elements.ids_from_generate.assign(tokens_.begin() + static_cast<int64_t>(delivered_),
                                    tokens_.end());
  if (capacity_.logprobs) {
    const std::vector<float>& token = output_logprobs_.chosen;
    elements.token_logprobs_list.assign(token.begin() + static_cast<int64_t>(delivered_),
                                        token.end());
    elements.log_probs_list = TopLocked(output_logprobs_, delivered_);
  }
  if (capacity_.prompt_logprobs && delivered_positions_ == 0) {
    elements.prompt_token_logprobs_list = prompt_logprobs_.chosen;
    elements.prompt_log_probs_list = TopLocked(prompt_logprobs_, 0);
  }
  if (outputs_ != nullptr) {
    elements.tensors_from_model_inference = {outputs_->Views(delivered_positions_, num_positions)};
  }
  elements.prefix_cache_len = cached_;
  elements.prefix_len_cpu = cached_on_host_;
  elements.prefix_len_gpu = cached_ - cached_on_host_;
  delivered_ = tokens_.size();
  delivered_positions_ = num_positions;
  return elements;
}

std::vector<std::vector<std::pair<int64_t, float>>> ResultQueueImpl::TopLocked(
    const OutputLogprobs& logprobs, size_t begin) const {
  std::vector<std::vector<std::pair<int64_t, float>>> list;
  const auto num_top = static_cast<size_t>(capacity_.top_logprobs);
  for (size_t i = begin; i < logprobs.chosen.size(); ++i) {
    auto& top = list.emplace_back();
    for (const TokenLogprob& t : std::span(logprobs.top).subspan(i * num_top, num_top)) {
      if (t.token >= 0) top.emplace_back(t.token, t.logprob);
    }
  }
  return list;
}

std::optional<GeneratedElements> ResultQueueImpl::Get() {
  if (!home_.IsHere()) return std::nullopt;
  MutexLock lock(mutex_);
  ++num_waiters_;
  changed_.wait(lock.native(), [this]() AS_REQUIRES(mutex_) { return Readable(); });
  --num_waiters_;
  return TakeLocked();
}

std::optional<GeneratedElements> ResultQueueImpl::Get(int64_t timeout_ms) {
  if (!home_.IsHere()) return std::nullopt;
  MutexLock lock(mutex_);
  if (timeout_ms > 0) {
    ++num_waiters_;
    changed_.wait_for(lock.native(),
                      std::chrono::milliseconds(std::min(timeout_ms, kLongestWaitMs)),
                      [this]() AS_REQUIRES(mutex_) { return Readable(); });
    --num_waiters_;
  }
  return TakeLocked();
}

std::optional<GeneratedElements> ResultQueueImpl::GetNoWait() {
  if (!home_.IsHere()) return std::nullopt;
  MutexLock lock(mutex_);
  return TakeLocked();
}

void ResultQueueImpl::OnScheduled(int64_t now_us, int64_t num_cached, int64_t num_on_host) {
  MutexLock lock(mutex_);
  if (scheduled_us_ == 0) scheduled_us_ = now_us;
  cached_ += num_cached;
  cached_on_host_ += num_on_host;
}

void ResultQueueImpl::OnDrafts(int64_t drafted, int64_t accepted) {
  MutexLock lock(mutex_);
  drafted_ += drafted;
  accepted_ += accepted;
}

void ResultQueueImpl::SetPromptLogprobs(int64_t position, const RowLogprobs& logprobs) {
  MutexLock lock(mutex_);
  const int64_t index = position - capacity_.scored_begin;
  prompt_logprobs_.chosen[static_cast<size_t>(index)] = logprobs.chosen;
  std::copy(logprobs.top.begin(), logprobs.top.end(),
            prompt_logprobs_.top.begin() + index * capacity_.top_logprobs);
}

void ResultQueueImpl::Append(int32_t token, const RowLogprobs* logprobs, int64_t now_us) {
  MutexLock lock(mutex_);
  if (tokens_.empty()) {
    first_token_us_ = now_us;
    status_ = GenerateRequestStatus::kContextFinished;
  } else {
    status_ = GenerateRequestStatus::kGenerating;
  }
  last_token_us_ = now_us;
  tokens_.push_back(token);
  if (logprobs != nullptr) output_logprobs_.Add(logprobs->chosen, logprobs->top);
}

void ResultQueueImpl::AppendRanked(std::span<const int32_t> tokens, const OutputLogprobs& logprobs,
                                   double score, int64_t now_us) {
  MutexLock lock(mutex_);
  first_token_us_ = last_token_us_ = now_us;
  status_ = GenerateRequestStatus::kGenerating;
  score_ = score;
  tokens_.assign(tokens.begin(), tokens.end());
  if (capacity_.logprobs) output_logprobs_ = logprobs;
}

template <class OnSet>
void ResultQueueImpl::AnnounceLocked(const OnSet& on_set) {
  if (num_waiters_ > 0) changed_.notify_all();
  if (engine_set_->Link(engine_hook_)) on_set(engine_set_);
  const bool has_news = !attached_only_end_ || IsTerminal(status_);
  if (attached_set_ != nullptr && has_news && attached_set_->Link(attached_hook_)) {
    on_set(attached_set_);
  }
}

void ResultQueueImpl::Finish(FinishReason reason, const std::string& error, int64_t now_us) {
  MutexLock lock(mutex_);
  if (IsTerminal(status_)) return;
  switch (reason) {
    case FinishReason::kInterrupted:
      status_ = GenerateRequestStatus::kGenerateInterrupted;
      break;
    case FinishReason::kError:
      status_ = GenerateRequestStatus::kInternalError;
      break;
    default:
      status_ = GenerateRequestStatus::kGenerateFinished;
  }
  reason_ = reason;
  error_ = ErrorText(error);
  finished_us_ = now_us;
  AnnounceLocked([](const std::shared_ptr<CompletionSetImpl>& set) { set->Signal(); });
}

void ResultQueueImpl::Announce(CompletionSets& unsignalled) {
  MutexLock lock(mutex_);
  AnnounceLocked(
      [&](const std::shared_ptr<CompletionSetImpl>& set) { unsignalled.push_back(set); });
}

bool ResultQueueImpl::WaitTerminal(int64_t timeout_ms) {
  if (!home_.IsHere()) return true;
  MutexLock lock(mutex_);
  ++num_waiters_;
  const auto terminal = [this]() AS_REQUIRES(mutex_) { return IsTerminal(status_); };
  const bool done =
      changed_.wait_for(lock.native(), std::chrono::milliseconds(timeout_ms), terminal);
  --num_waiters_;
  return done;
}

void ResultQueueImpl::AttachSet(std::shared_ptr<CompletionSetImpl> set, bool only_end) {
  AS_CHECK(home_.IsHere()) << error();
  const bool is_engines = set == engine_set_;  // It has the queue anyway, by a hook of its own.
  MutexLock lock(mutex_);
  if (attached_set_ != nullptr) attached_set_->Unlink(attached_hook_);
  attached_set_ = is_engines ? nullptr : set;
  attached_only_end_ = only_end;
  const bool has_news = only_end ? IsTerminal(status_) : Readable();
  if (set != nullptr && has_news && set->Link(is_engines ? engine_hook_ : attached_hook_)) {
    set->Signal();
  }
}

}  // namespace allspark
