#include "allspark/config.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <string_view>

#include "allspark/engine.h"
#include "base/field_list.h"

namespace allspark {

static_assert(FieldsListEveryMember<RuntimeConfig>(),
              "RuntimeConfig has a member that Fields() does not list");
static_assert(FieldsListEveryMember<GenerationConfig>(),
              "GenerationConfig has a member that Fields() does not list");
static_assert(FieldsListEveryMember<ModelInfo>(),
              "ModelInfo has a member that Fields() does not list");
static_assert(FieldsListEveryMember<EngineStat>(),
              "EngineStat has a member that Fields() does not list");

namespace {

// Inside the engine, token ids are int32.
constexpr int64_t kMaxTokenId = std::numeric_limits<int32_t>::max();

// "is <value>; it must be <form>".
Status Malformed(const std::string& name, const std::string& value, const std::string& form) {
  return Status::InvalidArgument(name + " is " + value + "; it must be " + form);
}

// Device ids after the colon: decimal, at most five digits, separated by commas, none twice.
bool AreDeviceIds(std::string_view text) {
  std::vector<std::string_view> seen;
  while (true) {
    const size_t comma = text.find(',');
    const std::string_view id = text.substr(0, comma);
    const bool digits =
        !id.empty() && id.size() <= 5 &&
        std::all_of(id.begin(), id.end(), [](char c) { return c >= '0' && c <= '9'; });
    const bool padded = id.size() > 1 && id[0] == '0';
    if (!digits || padded || std::find(seen.begin(), seen.end(), id) != seen.end()) return false;
    seen.push_back(id);
    if (comma == std::string_view::npos) return true;
    text.remove_prefix(comma + 1);
  }
}

Status CheckComputeUnit(const std::string& unit) {
  const std::string_view text = unit;
  if (text == "CPU_NUMA") return Status::Ok();
  const size_t colon = text.find(':');
  const std::string_view type = text.substr(0, colon);
  const bool is_type = type == "CPU" || type == "CPU_NUMA" || type == "CUDA";
  if (colon == std::string_view::npos || !is_type || !AreDeviceIds(text.substr(colon + 1))) {
    return Malformed("compute_unit", FormatValue(unit),
                     "CPU:0, CPU_NUMA, CPU_NUMA:<ids> or CUDA:<ids>, ids separated by commas, such "
                     "as CUDA:0,1");
  }
  if (type == "CPU" && unit != "CPU:0") {
    return Malformed("compute_unit", FormatValue(unit),
                     "CPU:0, which is the whole CPU, or CPU_NUMA:<ids>, which are NUMA nodes");
  }
  return Status::Ok();
}

std::string ElementName(const std::string& name, size_t index) {
  return name + "[" + std::to_string(index) + "]";
}

Status CheckTokenIds(const std::string& name, const std::vector<int64_t>& ids) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] <= kMaxTokenId) continue;
    return CheckRange(ElementName(name, i).c_str(), ids[i], 0, static_cast<double>(kMaxTokenId));
  }
  return Status::Ok();
}

Status CheckWords(const std::string& name, const std::vector<std::vector<int64_t>>& words) {
  if (words.size() > static_cast<size_t>(kMaxWords)) {
    return Status::InvalidArgument(name + " has " + std::to_string(words.size()) +
                                   " entries; the bound is " + std::to_string(kMaxWords));
  }
  size_t num_ids = 0;
  for (const std::vector<int64_t>& word : words) num_ids += word.size();
  if (num_ids > static_cast<size_t>(kMaxWordIds)) {
    return Status::InvalidArgument(name + " has " + std::to_string(num_ids) +
                                   " token ids; the bound is " + std::to_string(kMaxWordIds));
  }
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string word = ElementName(name, i);
    if (words[i].empty()) {
      return Status::InvalidArgument(word + " is empty; it must hold at least one token id");
    }
    AS_RETURN_IF_ERROR(CheckTokenIds(word, words[i]));
  }
  return Status::Ok();
}

Status CheckLogitBias(const std::map<int64_t, double>& logit_bias) {
  for (const auto& [token, bias] : logit_bias) {
    AS_RETURN_IF_ERROR(
        CheckRange("a token id of logit_bias", token, 0, static_cast<double>(kMaxTokenId)));
    const std::string element = "logit_bias[" + std::to_string(token) + "]";
    AS_RETURN_IF_ERROR(CheckRange(element.c_str(), bias, -100, 100));
  }
  return Status::Ok();
}

// Checks the fields that must have one value where the field `name` is above 1; keeps the first
// failure.
class Contradictions {
 public:
  Contradictions(const char* name, int64_t value) : name_(name), value_(value) {}
  template <typename T>
  void Require(const char* field, const T& value, const T& only) {
    if (value == only || !status_.ok()) return;
    status_ = Malformed(field, FormatValue(value),
                        FormatValue(only) + " where " + name_ + " is " + std::to_string(value_));
  }
  const Status& status() const { return status_; }

 private:
  const char* name_;
  int64_t value_;
  Status status_;
};

// A group of sequences has no tensors and no prompt_only, and does not continue an earlier output.
void RequirePlainOutput(const GenerationConfig& config, Contradictions& group) {
  group.Require("num_generated_in_prompt", config.num_generated_in_prompt, int64_t{0});
  group.Require("prompt_only", config.prompt_only, false);
  group.Require("output_logits", config.output_logits, OutputRows::kNone);
  group.Require("output_last_hidden_state", config.output_last_hidden_state, OutputRows::kNone);
  group.Require("enable_tensors_from_model_inference", config.enable_tensors_from_model_inference,
                false);
  group.Require("pooling", config.pooling, Pooling::kNone);
}

Status CheckBeams(const GenerationConfig& config) {
  if (config.num_beams == 1) return Status::Ok();
  Contradictions beams("num_beams", config.num_beams);
  beams.Require("do_sample", config.do_sample, false);
  beams.Require("best_of", config.best_of, int64_t{1});
  beams.Require("prompt_lookup_num_tokens", config.prompt_lookup_num_tokens, int64_t{0});
  beams.Require("prompt_logprobs", config.prompt_logprobs, false);
  // A search keeps one more candidate for each token that may end a sequence. For ends by
  // repetition, the number of such tokens is not known.
  if (config.repetition_ngram_size > 0) {
    beams.Require("repetition_ngram_threshold", config.repetition_ngram_threshold, int64_t{0});
  }
  RequirePlainOutput(config, beams);
  return beams.status();
}

Status CheckSamples(const GenerationConfig& config) {
  if (config.best_of == 1) return Status::Ok();
  Contradictions samples("best_of", config.best_of);
  samples.Require("do_sample", config.do_sample, true);
  RequirePlainOutput(config, samples);
  return samples.status();
}

Status CheckSequences(const GenerationConfig& config) {
  AS_RETURN_IF_ERROR(CheckBeams(config));
  AS_RETURN_IF_ERROR(CheckSamples(config));
  const bool is_search = config.num_beams > 1;
  const int64_t most = is_search ? config.num_beams : config.best_of;
  if (config.num_return_sequences <= most) return Status::Ok();
  return Malformed("num_return_sequences", FormatValue(config.num_return_sequences),
                   std::string("at most ") + (is_search ? "num_beams" : "best_of") + ", which is " +
                       FormatValue(most));
}

}  // namespace

Status Validate(const RuntimeConfig& config) {
  if (config.model_name.empty()) {
    return Status::InvalidArgument("model_name is empty; it must name the model");
  }
  AS_RETURN_IF_ERROR(CheckFieldRanges(config));
  AS_RETURN_IF_ERROR(CheckComputeUnit(config.compute_unit));
  const int64_t size = config.block_size;
  if (size != 16 && size != 32 && size != 64 && size != 128) {
    return Malformed("cache_span_size", FormatValue(size), "16, 32, 64 or 128");
  }
  if (config.cache_mode < CacheMode::kDefault || config.cache_mode > CacheMode::kQuantK8V4) {
    return Malformed("cache_mode", FormatValue(config.cache_mode),
                     "AsCacheDefault (0), AsCacheQuantI8 (1), AsCacheQuantU4 (2) or "
                     "AsCacheQuantK8V4 (3)");
  }
  return Status::Ok();
}

Status Validate(const GenerationConfig& config) {
  AS_RETURN_IF_ERROR(CheckFieldRanges(config));
  if (config.max_length > 0 && config.min_length > config.max_length) {
    return Malformed("min_length", FormatValue(config.min_length),
                     "at most max_length, which is " + FormatValue(config.max_length));
  }
  if (config.max_new_tokens > 0 && config.min_new_tokens > config.max_new_tokens) {
    return Malformed("min_new_tokens", FormatValue(config.min_new_tokens),
                     "at most max_new_tokens, which is " + FormatValue(config.max_new_tokens));
  }
  if (config.max_new_tokens > 0 && config.num_generated_in_prompt >= config.max_new_tokens) {
    return Malformed("num_generated_in_prompt", FormatValue(config.num_generated_in_prompt),
                     "below max_new_tokens, which is " + FormatValue(config.max_new_tokens));
  }
  AS_RETURN_IF_ERROR(CheckSequences(config));
  AS_RETURN_IF_ERROR(CheckTokenIds("stop_token_ids", config.stop_token_ids));
  AS_RETURN_IF_ERROR(CheckWords("stop_words_ids", config.stop_words_ids));
  AS_RETURN_IF_ERROR(CheckWords("bad_words_ids", config.bad_words_ids));
  return CheckLogitBias(config.logit_bias);
}

std::string ToString(const RuntimeConfig& config) { return FormatFields(config); }
std::string ToString(const GenerationConfig& config) { return FormatFields(config); }
std::string ToString(const ModelInfo& info) { return FormatFields(info); }

}  // namespace allspark
