#include "engine/request.h"

#include <algorithm>
#include <string>

#include "base/int_math.h"
#include "engine/drafter.h"

namespace allspark {

Request::Request(RequestSpec checked, std::span<const int64_t> prompt_ids,
                 const RequestLimits& limits, std::shared_ptr<OutputTensors> wanted_outputs,
                 const std::shared_ptr<CompletionSetImpl>& engine_set)
    : spec(std::move(checked)), outputs(std::move(wanted_outputs)) {
  id = static_cast<int64_t>(spec.request_id);
  priority = spec.priority;
  num_tokens = spec.prompt_length;
  max_length = spec.max_length;
  block_table.reserve(static_cast<size_t>(CeilDiv(max_length, limits.block_size)));
  if (spec.scores_prompt) max_cached = spec.scored_begin;
  if (outputs != nullptr && outputs->WantsWholePrompt()) max_cached = 0;
  Reserve(spec, limits.vocab_size);
  for (int64_t token : prompt_ids) tokens.push_back(static_cast<int32_t>(token));
  token_ids = tokens.data();
  if (spec.processors.NeedsCounts()) {
    for (int64_t i = 0; i < num_tokens; ++i) {
      counts.Add(tokens[static_cast<size_t>(i)], /*is_output=*/i >= spec.output_begin);
    }
  }
  if (spec.NeedsRepeats()) repeats.Start(tokens);
  logprobs.raw = spec.logprobs.raw;
  if (spec.logprobs.wanted) logprobs.top.resize(static_cast<size_t>(spec.logprobs.num_top));
  drafts.reserve(static_cast<size_t>(
      std::max(spec.most_looked_up, spec.uses_draft_model ? limits.num_draft_tokens : 0)));
  const QueueCapacity capacity{.tokens = max_length - spec.prompt_length,
                               .logprobs = spec.logprobs.wanted,
                               .prompt_logprobs = spec.scores_prompt,
                               .scored_begin = spec.scored_begin,
                               .top_logprobs = spec.logprobs.num_top};
  queue = std::shared_ptr<ResultQueueImpl>(
      new ResultQueueImpl(spec.request_id, spec.prompt_length, capacity, engine_set, outputs),
      ResultQueueImpl::Delete);
}

Result<std::shared_ptr<Request>> Request::Create(uint64_t request_id,
                                                 std::span<const int64_t> prompt_ids,
                                                 const GenerationConfig& config,
                                                 const RequestLimits& limits,
                                                 std::shared_ptr<CompletionSetImpl> engine_set,
                                                 std::shared_ptr<TokenMask> token_mask) {
  AS_ASSIGN_OR_RETURN(RequestSpec checked, RequestSpec::Create(request_id, prompt_ids, config,
                                                               limits, token_mask != nullptr));
  const auto make = [&](RequestSpec member) -> Result<std::shared_ptr<Request>> {
    // The last token of an output is never computed, so its position has no outputs.
    const OutputTensors::Sizes sizes{
        .prompt_length = member.prompt_length,
        .num_positions = member.prompt_only ? member.prompt_length : member.max_length - 1,
        .hidden_size = limits.hidden_size,
        .vocab_size = limits.vocab_size};
    AS_ASSIGN_OR_RETURN(std::shared_ptr<OutputTensors> tensors,
                        OutputTensors::Create(config, sizes));
    return std::make_shared<Request>(std::move(member), prompt_ids, limits, std::move(tensors),
                                     engine_set);
  };
  AS_ASSIGN_OR_RETURN(std::shared_ptr<Request> created, make(std::move(checked)));
  Request& request = *created;
  request.ReadPromptWords();
  if (token_mask != nullptr) {
    AS_ASSIGN_OR_RETURN(request.mask, MaskReader::Create(std::move(token_mask), limits.vocab_size));
  }
  const int64_t num_members = std::max(config.num_beams, config.best_of);
  if (num_members == 1) return created;
  std::vector<std::shared_ptr<Request>> others;
  for (int64_t i = 1; i < num_members; ++i) {
    AS_ASSIGN_OR_RETURN(std::shared_ptr<Request> other, make(request.spec.ForMember(i)));
    other->words = request.words;
    others.push_back(std::move(other));
  }
  request.owned_group =
      std::make_unique<RequestGroup>(&request, std::move(others), config, limits.vocab_size);
  return created;
}

void Request::ReadPromptWords() {
  if (spec.processors.bad_words == nullptr && spec.ends.words == nullptr) return;
  for (int64_t i = 0; i < num_tokens; ++i) words = NextWords(tokens[static_cast<size_t>(i)], i);
}

WordStates Request::NextWords(int32_t token, int64_t position) const {
  WordStates after;
  const auto& bad_words = spec.processors.bad_words;
  if (bad_words != nullptr) after.bad = bad_words->Next(words.bad, token);
  // A stop word counts only if it lies wholly in the output: the prompt may contain it.
  if (spec.ends.words != nullptr && position >= spec.output_begin) {
    after.stop = spec.ends.words->Next(words.stop, token);
  }
  return after;
}

void Request::UseLora(std::shared_ptr<const LoadedLora> loaded) {
  if (loaded == nullptr) return;
  const auto give = [&](Request* request) {
    request->lora = loaded;
    request->cache_salt = loaded->cache_salt;
  };
  if (group == nullptr) return give(this);
  for (Request* member : group->members()) give(member);
}

SamplingRow Request::NextRow(float* logits) {
  SamplingRow row{.params = &spec.sampling, .logits = logits, .position = num_tokens};
  if (spec.processors.Any()) {
    row.edits = {.processors = &spec.processors,
                 .tokens = {tokens.data(), static_cast<size_t>(num_tokens)},
                 .counts = &counts,
                 .repeats = &repeats,
                 .bad_word_state = words.bad};
  }
  if (is_beam()) row.candidates = &candidates;
  // A sample's score is computed from log-probabilities.
  if (spec.logprobs.wanted || is_sample()) row.logprobs = &logprobs;
  if (num_tokens < spec.min_length) row.edits.banned = spec.ends.tokens;
  return row;
}

void Request::ClearOffers() {
  drafter = nullptr;
  num_drafts = 0;
  drafts.clear();
  num_taken = 0;
}

void Request::Offer(const DraftOffer& offer) {
  if (drafter != nullptr && offer.acceptance_rate - offer.cost <= acceptance_rate - draft_cost) {
    return;
  }
  drafter = offer.drafter;
  num_drafts = std::max<int64_t>(0, std::min(offer.num_drafts, max_length - num_tokens - 1));
  acceptance_rate = offer.acceptance_rate;
  draft_cost = offer.cost;
}

int32_t Request::KnownOrDrafted(int64_t position) const {
  return position < num_tokens ? tokens[static_cast<size_t>(position)]
                               : drafts[static_cast<size_t>(position - num_tokens)];
}

bool Request::TakeDraft() {
  if (num_taken < drafts.size() && drafts[num_taken] == tokens.back()) {
    ++num_taken;
    return true;
  }
  EndDrafts();
  return false;
}

void Request::EndDrafts() {
  if (drafts.empty()) return;
  const auto drafted = static_cast<int64_t>(drafts.size());
  const auto accepted = static_cast<int64_t>(num_taken);
  drafter->Verified(*this, accepted);
  queue->OnDrafts(drafted, accepted);
  drafts.clear();
}

void Request::OnScheduled(int64_t now_us, int64_t num_cached, int64_t num_on_host) {
  if (scheduled_us == 0) scheduled_us = now_us;
  if (!is_beam()) return queue->OnScheduled(now_us, num_cached, num_on_host);
  for (Request* beam : group->returned()) {
    beam->queue->OnScheduled(now_us, num_cached, num_on_host);
  }
}

void Request::Deliver(int32_t token, int64_t now_us) {
  if (group == nullptr) {
    queue->Append(token, spec.logprobs.wanted ? &logprobs : nullptr, now_us);
    return;
  }
  sum_logprobs += logprobs.chosen;
  if (!spec.logprobs.wanted) return;
  output_logprobs.Add(logprobs.chosen, logprobs.top);
}

FinishReason Request::Append(int32_t token) {
  words = NextWords(token, static_cast<int64_t>(tokens.size()));
  tokens.push_back(token);
  num_tokens = static_cast<int64_t>(tokens.size());
  max_cached = kNoTokenLimit;
  num_written = num_tokens - 1;  // accepted drafts included
  if (spec.processors.NeedsCounts()) counts.Add(token, /*is_output=*/true);
  const FinishReason reason = Reason();
  if (spec.NeedsRepeats()) repeats.Append(tokens);
  return reason;
}

FinishReason Request::ReasonAfter(int32_t token) {
  const WordStates before = words;
  words = NextWords(token, num_tokens);
  tokens.push_back(token);
  ++num_tokens;
  const FinishReason reason = Reason();
  tokens.pop_back();
  --num_tokens;
  words = before;
  return reason;
}

bool Request::IsAtEnd() const {
  const EndConditions& ends = spec.ends;
  if (ends.EndsWith(tokens.back())) return true;
  if (ends.words != nullptr && ends.words->EndsWord(words.stop)) return true;
  return ends.IsLoop(tokens, spec.output_begin, repeats);
}

FinishReason Request::Reason() const {
  if (num_tokens >= spec.min_length && IsAtEnd()) return FinishReason::kStop;
  return num_tokens >= max_length ? FinishReason::kLength : FinishReason::kNone;
}

void Request::Finish(FinishReason reason, const std::string& error, int64_t now_us) {
  if (group != nullptr) {
    group->Finish(reason, error, now_us);
    return;
  }
  ReleaseResources();
  queue->Finish(reason, error, now_us);
}

void Request::ReleaseResources() {
  text() = TextState();
  token_ids = nullptr;
  std::vector<int32_t>().swap(block_table);
  std::vector<int32_t>().swap(drafts);
  mask.reset();
  outputs.reset();
  lora.reset();
}

}  // namespace allspark
