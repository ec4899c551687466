#include "engine/request.h"

#include <algorithm>
#include <random>
#include <string>

#include "base/clock.h"
#include "base/int_math.h"
#include "engine/drafter.h"

namespace allspark {

Status CheckTokenIds(std::span<const int64_t> ids, int64_t vocab_size) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocab_size) continue;
    return Status::InvalidArgument("input_ids[" + std::to_string(i) + "] is " +
                                   std::to_string(ids[i]) + "; it must be in [0, " +
                                   std::to_string(vocab_size - 1) + "]");
  }
  return Status::Ok();
}

namespace {

// A prompt_only request may have one token more, since no output follows.
Status CheckPrompt(std::span<const int64_t> prompt_ids, int64_t max_length, bool prompt_only,
                   const RequestLimits& limits) {
  const auto length = static_cast<int64_t>(prompt_ids.size());
  if (length == 0) return Status::ExceedLimit("input_ids is empty; a prompt has at least 1 token");
  if (prompt_only ? length > max_length : length >= max_length) {
    return Status::ExceedLimit("input_ids has " + std::to_string(length) + " tokens; it must " +
                               (prompt_only ? "not exceed" : "be below") +
                               " max_length, which is " + std::to_string(max_length));
  }
  return CheckTokenIds(prompt_ids, limits.vocab_size);
}

// Checks that every token id of the config is in the vocabulary; Validate has refused negative
// ones.
Status CheckIds(const GenerationConfig& config, int64_t vocab_size) {
  Status status;
  const auto refuse = [&](int64_t id, const std::string& what) {
    if (!status.ok()) return;
    status = Status::InvalidArgument(what + " " + std::to_string(id) +
                                     "; it must be below the vocabulary size, which is " +
                                     std::to_string(vocab_size));
  };
  const auto check = [&](int64_t id, const char* what) {
    if (id >= vocab_size) refuse(id, what);
  };
  const auto check_words = [&](const std::vector<std::vector<int64_t>>& words, const char* name) {
    for (size_t i = 0; i < words.size(); ++i) {
      for (int64_t id : words[i]) {
        if (id >= vocab_size) refuse(id, std::string(name) + '[' + std::to_string(i) + "] holds");
      }
    }
  };
  check(config.eos_token_id, "eos_token_id is");
  for (int64_t id : config.stop_token_ids) check(id, "stop_token_ids holds");
  check_words(config.stop_words_ids, "stop_words_ids");
  check_words(config.bad_words_ids, "bad_words_ids");
  for (const auto& [id, bias] : config.logit_bias) check(id, "logit_bias holds");
  return status;
}

// Refuses a minimum length that the request cannot reach.
Status CheckMinimum(const GenerationConfig& config, int64_t output_begin, int64_t max_length) {
  if (config.min_length > max_length) {
    return Status::InvalidArgument(
        "min_length is " + std::to_string(config.min_length) +
        "; it must not exceed the longest length this request can reach, which is " +
        std::to_string(max_length));
  }
  if (config.min_new_tokens > max_length - output_begin) {
    return Status::InvalidArgument(
        "min_new_tokens is " + std::to_string(config.min_new_tokens) +
        "; it must not exceed the longest output this request can reach, which is " +
        std::to_string(max_length - output_begin));
  }
  return Status::Ok();
}

uint64_t DrawSeed() {
  thread_local std::mt19937_64 generator{(static_cast<uint64_t>(std::random_device{}()) << 32) ^
                                         std::random_device{}()};
  return generator();
}

SamplingParams ToSamplingParams(const GenerationConfig& config) {
  SamplingParams params;
  params.greedy = !config.do_sample || config.temperature < 1e-5 || config.top_k == 1;
  params.temperature = static_cast<float>(config.temperature);
  params.top_k = static_cast<int32_t>(config.top_k);
  params.top_p = static_cast<float>(config.top_p);
  params.min_p = static_cast<float>(config.min_p);
  params.seed = config.seed >= 0 ? static_cast<uint64_t>(config.seed) : DrawSeed();
  return params;
}

void SortUnique(std::vector<int32_t>& ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

// The words of `min_size` tokens or more.
std::vector<std::vector<int32_t>> ToWords(const std::vector<std::vector<int64_t>>& words,
                                          size_t min_size) {
  std::vector<std::vector<int32_t>> result;
  for (const auto& word : words) {
    if (word.size() >= min_size) result.emplace_back(word.begin(), word.end());
  }
  return result;
}

std::shared_ptr<const WordMatcher> ToMatcher(const std::vector<std::vector<int32_t>>& words) {
  return words.empty() ? nullptr : std::make_shared<const WordMatcher>(words);
}

LogitsProcessors ToProcessors(const GenerationConfig& config) {
  LogitsProcessors processors;
  for (const auto& [id, bias] : config.logit_bias) {
    processors.logit_bias.emplace_back(static_cast<int32_t>(id), static_cast<float>(bias));
  }
  processors.repetition_penalty = static_cast<float>(config.repetition_penalty);
  processors.repetition_in_output_only = config.suppress_repetition_in_generation;
  processors.frequency_penalty = static_cast<float>(config.frequency_penalty);
  processors.presence_penalty = static_cast<float>(config.presence_penalty);
  processors.no_repeat_ngram_size = config.no_repeat_ngram_size;
  return processors;
}

bool EndsWithStop(const Request& request) {
  const auto& ends = request.end_tokens;
  return std::binary_search(ends.begin(), ends.end(), request.tokens.back()) ||
         (request.stop_words != nullptr && request.stop_words->EndsWord(request.words.stop));
}

// Whether the output's last n-gram occurs in it often enough to call it a loop.
bool EndsInRepetition(const Request& request) {
  const auto size = static_cast<size_t>(request.repetition_ngram_size);
  const std::span<const int32_t> output =
      std::span(request.tokens).subspan(static_cast<size_t>(request.output_begin));
  if (size == 0 || output.size() < size) return false;
  const std::span<const int32_t> last = output.last(size);
  int64_t occurrences = 0;
  for (size_t i = 0; i + size <= output.size(); ++i) {
    if (std::equal(last.begin(), last.end(), output.begin() + static_cast<int64_t>(i))) {
      ++occurrences;
    }
  }
  return occurrences >= request.repetition_ngram_threshold;
}

// Bounds the tokens that may end a beam: each is one more candidate of every row, kept in order.
Status CheckBeamEnds(const Request& request, const GenerationConfig& config) {
  constexpr int64_t kMaxEnds = 256;
  const int64_t num_ends =
      static_cast<int64_t>(request.end_tokens.size()) + request.num_stop_endings;
  if (config.num_beams == 1 || num_ends <= kMaxEnds) return Status::Ok();
  return Status::InvalidArgument(
      "stop_words_ids, stop_token_ids and eos_token_id have " + std::to_string(num_ends) +
      " different last tokens; the bound is " + std::to_string(kMaxEnds) + " where num_beams is " +
      std::to_string(config.num_beams));
}

// Creates the other members of a group: like the first, with the seeds and ids that follow.
Result<std::vector<std::shared_ptr<Request>>> CreateOthers(
    const Request& first, std::span<const int64_t> prompt_ids, GenerationConfig config,
    const RequestLimits& limits, const std::shared_ptr<CompletionSetImpl>& engine_set) {
  std::vector<std::shared_ptr<Request>> others;
  const int64_t count = std::max(config.num_beams, config.best_of);
  config.num_beams = config.best_of = config.num_return_sequences = 1;
  config.stop_words_ids.clear();
  config.bad_words_ids.clear();
  for (int64_t i = 1; i < count; ++i) {
    if (config.seed >= 0) ++config.seed;
    Result<std::shared_ptr<Request>> other = Request::Create(
        first.request_id + static_cast<uint64_t>(i), prompt_ids, config, limits, engine_set);
    if (!other.ok()) return other.status();
    (*other)->ShareWords(first);
    others.push_back(std::move(*other));
  }
  return others;
}

// Checks a group against the engine's limits, and that it has no token mask.
Status CheckGroup(const GenerationConfig& config, const RequestLimits& limits, bool has_mask) {
  const bool is_search = config.num_beams > 1;
  if (config.num_beams > limits.engine_max_batch) {
    return Status::InvalidArgument("num_beams is " + std::to_string(config.num_beams) +
                                   "; it must not exceed engine_max_batch, which is " +
                                   std::to_string(limits.engine_max_batch));
  }
  if (has_mask && (is_search || config.best_of > 1)) {
    return Status::InvalidArgument(
        std::string(is_search ? "num_beams is " : "best_of is ") +
        std::to_string(is_search ? config.num_beams : config.best_of) +
        "; it must be 1 for a guided request (response_format, token_mask)");
  }
  return Status::Ok();
}

}  // namespace

Result<std::shared_ptr<Request>> Request::Create(uint64_t request_id,
                                                 std::span<const int64_t> prompt_ids,
                                                 const GenerationConfig& config,
                                                 const RequestLimits& limits,
                                                 std::shared_ptr<CompletionSetImpl> engine_set,
                                                 std::shared_ptr<TokenMask> token_mask) {
  AS_RETURN_IF_ERROR(Validate(config));
  if (config.max_length > limits.engine_max_length) {
    return Status::ExceedLimit("max_length is " + std::to_string(config.max_length) +
                               "; it must not exceed engine_max_length, which is " +
                               std::to_string(limits.engine_max_length));
  }
  int64_t max_length = config.max_length > 0 ? config.max_length : limits.engine_max_length;
  AS_RETURN_IF_ERROR(CheckPrompt(prompt_ids, max_length, config.prompt_only, limits));
  AS_RETURN_IF_ERROR(CheckIds(config, limits.vocab_size));
  AS_RETURN_IF_ERROR(CheckGroup(config, limits, token_mask != nullptr));
  const auto prompt_length = static_cast<int64_t>(prompt_ids.size());
  const int64_t output_begin = prompt_length - config.num_generated_in_prompt;
  if (output_begin < 1) {
    return Status::InvalidArgument(
        "num_generated_in_prompt is " + std::to_string(config.num_generated_in_prompt) +
        "; it must be below the length of input_ids, which is " + std::to_string(prompt_length));
  }
  if (config.prompt_logprobs && config.prompt_logprobs_start >= prompt_length) {
    return Status::InvalidArgument(
        "prompt_logprobs_start is " + std::to_string(config.prompt_logprobs_start) +
        "; it must be below the length of input_ids, which is " + std::to_string(prompt_length));
  }
  if (config.prompt_only) {
    if (token_mask != nullptr) {
      return Status::InvalidArgument(
          "prompt_only is true; it must be false where a token mask (response_format) is given");
    }
    max_length = prompt_length;
  } else {
    if (config.max_new_tokens > 0) {
      max_length = std::min(max_length, output_begin + config.max_new_tokens);
    }
    AS_RETURN_IF_ERROR(CheckMinimum(config, output_begin, max_length));
  }
  // The last token of an output is never computed, so its position has no outputs.
  Result<std::shared_ptr<OutputTensors>> outputs = OutputTensors::Create(
      config, {.prompt_length = prompt_length,
               .num_positions = config.prompt_only ? prompt_length : max_length - 1,
               .hidden_size = limits.hidden_size,
               .vocab_size = limits.vocab_size});
  if (!outputs.ok()) return outputs.status();

  auto request = std::make_shared<Request>();
  request->request_id = request_id;
  request->id = static_cast<int64_t>(request_id);
  request->priority = config.priority;
  if (config.timeout_ms > 0) request->deadline_us = SteadyNowUs() + config.timeout_ms * 1000;
  request->num_tokens = prompt_length;
  request->max_length = max_length;
  request->block_table.reserve(static_cast<size_t>(CeilDiv(max_length, limits.block_size)));
  request->prompt_length = prompt_length;
  request->output_begin = output_begin;
  request->min_length = std::max(config.min_length, output_begin + config.min_new_tokens);
  if (config.repetition_ngram_threshold > 0) {
    request->repetition_ngram_size = config.repetition_ngram_size;
    request->repetition_ngram_threshold = config.repetition_ngram_threshold;
  }
  request->sampling = ToSamplingParams(config);
  request->processors = ToProcessors(config);
  request->tokens.reserve(static_cast<size_t>(max_length));
  for (int64_t id : prompt_ids) request->tokens.push_back(static_cast<int32_t>(id));
  request->token_ids = request->tokens.data();
  request->SetWords(config);
  AS_RETURN_IF_ERROR(CheckBeamEnds(*request, config));
  if (request->processors.NeedsCounts()) {
    request->counts = TokenCounts(std::min(max_length, limits.vocab_size));
    for (int64_t i = 0; i < prompt_length; ++i) {
      request->counts.Add(request->tokens[static_cast<size_t>(i)], /*is_output=*/i >= output_begin);
    }
  }
  request->wants_logprobs = config.logprobs;
  request->top_logprobs = config.top_logprobs;
  request->prompt_only = config.prompt_only;
  request->scores_prompt = config.prompt_logprobs;
  request->scored_begin = std::max(config.prompt_logprobs_start - 1, int64_t{0});
  request->outputs = std::move(*outputs);
  if (config.prompt_logprobs) request->max_cached = request->scored_begin;
  if (request->outputs != nullptr && request->outputs->WantsWholePrompt()) request->max_cached = 0;
  request->logprobs.raw = config.logprobs_mode == "raw";
  if (config.logprobs) request->logprobs.top.resize(static_cast<size_t>(config.top_logprobs));
  const QueueCapacity capacity{.tokens = max_length - prompt_length,
                               .logprobs = config.logprobs,
                               .prompt_logprobs = config.prompt_logprobs,
                               .scored_begin = request->scored_begin,
                               .top_logprobs = config.top_logprobs};
  request->queue = std::shared_ptr<ResultQueueImpl>(
      new ResultQueueImpl(request_id, prompt_length, capacity, engine_set, request->outputs),
      ResultQueueImpl::Delete);
  if (token_mask != nullptr) {
    Result<std::unique_ptr<MaskReader>> mask =
        MaskReader::Create(std::move(token_mask), limits.vocab_size);
    if (!mask.ok()) return mask.status();
    request->mask = std::move(*mask);
  } else {
    // A mask is made for one token at a time, so a guided request has no drafts.
    request->most_looked_up = config.prompt_lookup_num_tokens;
    request->uses_draft_model = config.use_draft_model && limits.num_draft_tokens > 0;
    request->drafts.reserve(static_cast<size_t>(std::max(
        request->most_looked_up, request->uses_draft_model ? limits.num_draft_tokens : 0)));
  }
  if (config.num_beams > 1 || config.best_of > 1) {
    auto others = CreateOthers(*request, prompt_ids, config, limits, engine_set);
    if (!others.ok()) return others.status();
    request->owned_group = std::make_unique<RequestGroup>(request.get(), std::move(*others), config,
                                                          limits.vocab_size);
  }
  return request;
}

// Words of one token are end tokens, which can be masked before the minimum length is reached.
void Request::SetWords(const GenerationConfig& config) {
  if (config.early_stopping && !config.ignore_eos && config.eos_token_id >= 0) {
    end_tokens.push_back(static_cast<int32_t>(config.eos_token_id));
  }
  for (int64_t token : config.stop_token_ids) end_tokens.push_back(static_cast<int32_t>(token));
  for (const auto& word : config.stop_words_ids) {
    if (word.size() == 1) end_tokens.push_back(static_cast<int32_t>(word[0]));
  }
  SortUnique(end_tokens);
  const auto longer_words = ToWords(config.stop_words_ids, 2);
  std::vector<int32_t> endings;
  for (const auto& word : longer_words) {
    const bool is_end = std::binary_search(end_tokens.begin(), end_tokens.end(), word.back());
    if (!is_end) endings.push_back(word.back());
  }
  SortUnique(endings);
  num_stop_endings = static_cast<int64_t>(endings.size());
  stop_words = ToMatcher(longer_words);
  processors.bad_words = ToMatcher(ToWords(config.bad_words_ids, 1));
  for (int64_t i = 0; i < num_tokens; ++i) words = NextWords(tokens[static_cast<size_t>(i)], i);
}

void Request::ShareWords(const Request& other) {
  end_tokens = other.end_tokens;
  num_stop_endings = other.num_stop_endings;
  stop_words = other.stop_words;
  processors.bad_words = other.processors.bad_words;
  words = other.words;
}

WordStates Request::NextWords(int32_t token, int64_t position) const {
  WordStates after;
  if (processors.bad_words != nullptr) after.bad = processors.bad_words->Next(words.bad, token);
  // A stop word counts only if it lies wholly in the output: the prompt may contain it.
  if (stop_words != nullptr && position >= output_begin) {
    after.stop = stop_words->Next(words.stop, token);
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
  SamplingRow row{.params = &sampling, .logits = logits, .position = num_tokens};
  if (processors.Any()) {
    row.processors = &processors;
    row.tokens = tokens.data();
    row.counts = &counts;
    row.bad_word_state = words.bad;
  }
  if (is_beam()) row.candidates = &candidates;
  // A sample's score is computed from log-probabilities.
  if (wants_logprobs || is_sample()) row.logprobs = &logprobs;
  if (num_tokens < min_length) {
    row.banned = end_tokens.data();
    row.num_banned = static_cast<int64_t>(end_tokens.size());
  }
  return row;
}

void Request::ClearOffers() {
  drafter = nullptr;
  num_drafts = 0;
  drafts.clear();
  num_taken = 0;
}

void Request::Offer(const DraftOffer& offer) {
  if (drafter != nullptr && offer.chance - offer.cost <= acceptance_rate - draft_cost) return;
  drafter = offer.drafter;
  num_drafts = std::max<int64_t>(0, std::min(offer.num_drafts, max_length - num_tokens - 1));
  acceptance_rate = offer.chance;
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
    queue->Append(token, wants_logprobs ? &logprobs : nullptr, now_us);
    return;
  }
  sum_logprobs += logprobs.chosen;
  if (!wants_logprobs) return;
  output_logprobs.chosen.push_back(logprobs.chosen);
  output_logprobs.top.insert(output_logprobs.top.end(), logprobs.top.begin(), logprobs.top.end());
}

FinishReason Request::Append(int32_t token) {
  words = NextWords(token, static_cast<int64_t>(tokens.size()));
  tokens.push_back(token);
  num_tokens = static_cast<int64_t>(tokens.size());
  max_cached = kNoTokenLimit;
  num_written = num_tokens - 1;  // accepted drafts included
  if (processors.NeedsCounts()) counts.Add(token, /*is_output=*/true);
  return Reason();
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

FinishReason Request::Reason() const {
  if (num_tokens >= min_length && (EndsWithStop(*this) || EndsInRepetition(*this))) {
    return FinishReason::kStop;
  }
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
  std::vector<int32_t>().swap(tokens);
  token_ids = nullptr;
  std::vector<int32_t>().swap(block_table);
  std::vector<int32_t>().swap(drafts);
  output_logprobs = OutputLogprobs();
  counts = TokenCounts();
  mask.reset();
  outputs.reset();
  lora.reset();
}

}  // namespace allspark
