#include "engine/request_spec.h"

#include <algorithm>
#include <random>
#include <string>

#include "base/clock.h"
#include "platform/home_process.h"

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

std::mt19937_64 MakeGenerator() {
  return std::mt19937_64{(static_cast<uint64_t>(std::random_device{}()) << 32) ^
                         std::random_device{}()};
}

// A fork draws others than its parent and its siblings.
uint64_t DrawSeed() {
  thread_local std::mt19937_64 generator = MakeGenerator();
  thread_local HomeProcess process;
  if (!process.IsHere()) {
    generator = MakeGenerator();
    process = HomeProcess();
  }
  return generator();
}

SamplingParams ToSamplingParams(const GenerationConfig& config) {
  SamplingParams params;
  params.greedy = !config.do_sample || config.top_k == 1;
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
  processors.bad_words = ToMatcher(ToWords(config.bad_words_ids, 1));
  return processors;
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

// Words of one token are end tokens, which can be masked before the minimum length is reached.
EndConditions ToEndConditions(const GenerationConfig& config) {
  EndConditions ends;
  if (config.early_stopping && !config.ignore_eos && config.eos_token_id >= 0) {
    ends.tokens.push_back(static_cast<int32_t>(config.eos_token_id));
  }
  for (int64_t token : config.stop_token_ids) ends.tokens.push_back(static_cast<int32_t>(token));
  for (const auto& word : config.stop_words_ids) {
    if (word.size() == 1) ends.tokens.push_back(static_cast<int32_t>(word[0]));
  }
  SortUnique(ends.tokens);
  const auto longer_words = ToWords(config.stop_words_ids, 2);
  std::vector<int32_t> endings;
  for (const auto& word : longer_words) {
    if (!ends.EndsWith(word.back())) endings.push_back(word.back());
  }
  SortUnique(endings);
  ends.num_word_endings = static_cast<int64_t>(endings.size());
  ends.words = ToMatcher(longer_words);
  if (config.repetition_ngram_threshold > 0) {
    ends.ngram_size = config.repetition_ngram_size;
    ends.ngram_threshold = config.repetition_ngram_threshold;
  }
  return ends;
}

// Bounds the tokens that may end a beam: each is one more candidate of every row, kept in order.
Status CheckBeamEnds(const EndConditions& ends, const GenerationConfig& config) {
  constexpr int64_t kMaxEnds = 256;
  const int64_t num_ends = static_cast<int64_t>(ends.tokens.size()) + ends.num_word_endings;
  if (config.num_beams == 1 || num_ends <= kMaxEnds) return Status::Ok();
  return Status::InvalidArgument(
      "stop_words_ids, stop_token_ids and eos_token_id have " + std::to_string(num_ends) +
      " different last tokens; the bound is " + std::to_string(kMaxEnds) + " where num_beams is " +
      std::to_string(config.num_beams));
}

// Sets output_begin and min_length, and lowers max_length.
Status SetLengths(const GenerationConfig& config, bool has_mask, RequestSpec& spec) {
  spec.output_begin = spec.prompt_length - config.num_generated_in_prompt;
  const std::string length_text = std::to_string(spec.prompt_length);
  if (spec.output_begin < 1) {
    return Status::InvalidArgument(
        "num_generated_in_prompt is " + std::to_string(config.num_generated_in_prompt) +
        "; it must be below the length of input_ids, which is " + length_text);
  }
  if (config.prompt_logprobs && config.prompt_logprobs_start >= spec.prompt_length) {
    return Status::InvalidArgument(
        "prompt_logprobs_start is " + std::to_string(config.prompt_logprobs_start) +
        "; it must be below the length of input_ids, which is " + length_text);
  }
  spec.min_length = std::max(config.min_length, spec.output_begin + config.min_new_tokens);
  if (config.prompt_only) {
    if (has_mask) {
      return Status::InvalidArgument(
          "prompt_only is true; it must be false where a token mask (response_format) is given");
    }
    spec.max_length = spec.prompt_length;
    return Status::Ok();
  }
  if (config.max_new_tokens > 0) {
    spec.max_length = std::min(spec.max_length, spec.output_begin + config.max_new_tokens);
  }
  return CheckMinimum(config, spec.output_begin, spec.max_length);
}

}  // namespace

bool EndConditions::EndsWith(int32_t token) const {
  return std::binary_search(tokens.begin(), tokens.end(), token);
}

bool EndConditions::IsLoop(std::span<const int32_t> text, int64_t output_begin,
                           const SuffixRepeats& repeats) const {
  return ngram_size > 0 && repeats.CountAfter(text, output_begin, ngram_size) >= ngram_threshold;
}

Result<RequestSpec> RequestSpec::Create(uint64_t request_id, std::span<const int64_t> prompt_ids,
                                        const GenerationConfig& config, const RequestLimits& limits,
                                        bool has_mask) {
  AS_RETURN_IF_ERROR(Validate(config));
  RequestSpec spec;
  if (config.max_length > limits.engine_max_length) {
    return Status::ExceedLimit("max_length is " + std::to_string(config.max_length) +
                               "; it must not exceed engine_max_length, which is " +
                               std::to_string(limits.engine_max_length));
  }
  spec.max_length = config.max_length > 0 ? config.max_length : limits.engine_max_length;
  AS_RETURN_IF_ERROR(CheckPrompt(prompt_ids, spec.max_length, config.prompt_only, limits));
  AS_RETURN_IF_ERROR(CheckIds(config, limits.vocab_size));
  AS_RETURN_IF_ERROR(CheckGroup(config, limits, has_mask));
  spec.prompt_length = static_cast<int64_t>(prompt_ids.size());
  AS_RETURN_IF_ERROR(SetLengths(config, has_mask, spec));
  spec.request_id = request_id;
  spec.priority = config.priority;
  if (config.timeout_ms > 0) spec.deadline_us = SteadyNowUs() + config.timeout_ms * 1000;
  spec.ends = ToEndConditions(config);
  AS_RETURN_IF_ERROR(CheckBeamEnds(spec.ends, config));
  spec.sampling = ToSamplingParams(config);
  spec.is_seeded = config.seed >= 0;
  spec.processors = ToProcessors(config);
  spec.logprobs = {.wanted = config.logprobs,
                   .num_top = config.top_logprobs,
                   .raw = config.logprobs_mode == LogprobsMode::kRaw};
  spec.prompt_only = config.prompt_only;
  spec.scores_prompt = config.prompt_logprobs;
  spec.scored_begin = std::max(config.prompt_logprobs_start - 1, int64_t{0});
  // A mask is made for one token at a time, and drafts follow one sequence.
  if (!has_mask && config.num_beams == 1) {
    spec.most_looked_up = config.prompt_lookup_num_tokens;
    spec.uses_draft_model = config.use_draft_model && limits.num_draft_tokens > 0;
  }
  return spec;
}

RequestSpec RequestSpec::ForMember(int64_t index) const {
  RequestSpec member = *this;
  const auto offset = static_cast<uint64_t>(index);
  member.request_id += offset;
  member.sampling.seed = is_seeded ? sampling.seed + offset : DrawSeed();
  return member;
}

}  // namespace allspark
