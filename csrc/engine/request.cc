#include "engine/request.h"

#include <algorithm>
#include <random>
#include <string>

#include "base/int_math.h"

namespace allspark {
namespace {

Status CheckPrompt(std::span<const int64_t> prompt_ids, int64_t max_length,
                   const RequestLimits& limits) {
  const auto length = static_cast<int64_t>(prompt_ids.size());
  if (length == 0) return Status::ExceedLimit("input_ids is empty; a prompt has at least 1 token");
  if (length >= max_length) {
    return Status::ExceedLimit("input_ids has " + std::to_string(length) +
                               " tokens; it must be below max_length, which is " +
                               std::to_string(max_length));
  }
  for (int64_t i = 0; i < length; ++i) {
    const int64_t id = prompt_ids[static_cast<size_t>(i)];
    if (id < 0 || id >= limits.vocab_size) {
      return Status::InvalidArgument("input_ids[" + std::to_string(i) + "] is " +
                                     std::to_string(id) + "; it must be in [0, " +
                                     std::to_string(limits.vocab_size - 1) + "]");
    }
  }
  return Status::Ok();
}

Status CheckIds(const GenerationConfig& config, int64_t vocab_size) {
  const std::string bound =
      "; it must be below the vocabulary size, which is " + std::to_string(vocab_size);
  if (config.eos_token_id >= vocab_size) {
    return Status::InvalidArgument("eos_token_id is " + std::to_string(config.eos_token_id) +
                                   bound);
  }
  for (size_t i = 0; i < config.stop_words_ids.size(); ++i) {
    for (int64_t id : config.stop_words_ids[i]) {
      if (id >= vocab_size) {
        return Status::InvalidArgument("stop_words_ids[" + std::to_string(i) + "] holds " +
                                       std::to_string(id) + bound);
      }
    }
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
  params.seed = config.seed >= 0 ? static_cast<uint64_t>(config.seed) : DrawSeed();
  return params;
}

}  // namespace

Result<std::shared_ptr<Request>> Request::Create(uint64_t request_id,
                                                 std::span<const int64_t> prompt_ids,
                                                 const GenerationConfig& config,
                                                 const RequestLimits& limits,
                                                 std::shared_ptr<CompletionSetImpl> engine_set) {
  AS_RETURN_IF_ERROR(Validate(config));
  if (config.max_length > limits.engine_max_length) {
    return Status::ExceedLimit("max_length is " + std::to_string(config.max_length) +
                               "; it must not exceed engine_max_length, which is " +
                               std::to_string(limits.engine_max_length));
  }
  int64_t max_length = config.max_length > 0 ? config.max_length : limits.engine_max_length;
  AS_RETURN_IF_ERROR(CheckPrompt(prompt_ids, max_length, limits));
  AS_RETURN_IF_ERROR(CheckIds(config, limits.vocab_size));
  const auto prompt_length = static_cast<int64_t>(prompt_ids.size());
  if (config.max_new_tokens > 0) {
    max_length = std::min(max_length, prompt_length + config.max_new_tokens);
  }
  if (config.min_length > max_length) {
    return Status::InvalidArgument(
        "min_length is " + std::to_string(config.min_length) +
        "; it must not exceed the longest length this request can reach, which is " +
        std::to_string(max_length));
  }

  auto request = std::make_shared<Request>();
  request->request_id = request_id;
  request->id = static_cast<int64_t>(request_id);
  request->priority = config.priority;
  request->num_tokens = prompt_length;
  request->max_length = max_length;
  request->block_table.reserve(static_cast<size_t>(CeilDiv(max_length, limits.block_size)));
  request->prompt_length = prompt_length;
  request->min_length = config.min_length;
  if (config.early_stopping && config.eos_token_id >= 0) {
    request->eos_token = static_cast<int32_t>(config.eos_token_id);
    request->end_tokens.push_back(request->eos_token);
  }
  for (const auto& word : config.stop_words_ids) {
    request->stop_words.emplace_back(word.begin(), word.end());
    if (word.size() == 1) request->end_tokens.push_back(static_cast<int32_t>(word[0]));
  }
  request->sampling = ToSamplingParams(config);
  request->tokens.reserve(static_cast<size_t>(max_length));
  for (int64_t id : prompt_ids) request->tokens.push_back(static_cast<int32_t>(id));
  request->queue = std::make_shared<ResultQueueImpl>(request_id, prompt_length,
                                                     max_length - prompt_length, engine_set);
  return request;
}

FinishReason Request::Append(int32_t token) {
  tokens.push_back(token);
  num_tokens = static_cast<int64_t>(tokens.size());
  if (num_tokens >= min_length) {
    if (token == eos_token) return FinishReason::kStop;
    const auto generated = static_cast<size_t>(num_tokens - prompt_length);
    for (const std::vector<int32_t>& word : stop_words) {
      // A stop word lies wholly in the output: the prompt may well contain it.
      if (word.size() <= generated && std::equal(word.rbegin(), word.rend(), tokens.rbegin())) {
        return FinishReason::kStop;
      }
    }
  }
  return num_tokens >= max_length ? FinishReason::kLength : FinishReason::kNone;
}

void Request::ReleaseResources() {
  std::vector<int32_t>().swap(tokens);
  std::vector<int32_t>().swap(block_table);
}

}  // namespace allspark
