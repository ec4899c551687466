// Plain configuration structs: how a model runs (RuntimeConfig) and what a request asks
// for (GenerationConfig). Every member is listed once in Fields(); range checks, unknown-key
// rejection, printing, equality and the Python binding derive from that list.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "allspark/choices.h"
#include "allspark/status.h"

namespace [[gnu::visibility("default")]] allspark {

// One member of a config struct: its public name, where it is, and the inclusive range of
// its values (numbers only).
template <typename Struct, typename T>
struct Field {
  const char* name;
  T Struct::*member;
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
};
template <typename Struct, typename T>
Field(const char*, T Struct::*) -> Field<Struct, T>;
template <typename Struct, typename T>
Field(const char*, T Struct::*, double, double) -> Field<Struct, T>;

// How keys and values are kept in the cache (DashInfer's AsCacheMode).
enum class CacheMode : int { kDefault = 0, kQuantI8 = 1, kQuantU4 = 2, kQuantK8V4 = 3 };

// How an installed model runs. The field names are those of DashInfer's AsModelConfig.
struct RuntimeConfig {
  // Unique within an engine.
  std::string model_name;
  // Path of NAME.asgraph; empty: the memory image registered under model_name.
  std::string model_path;
  // Path of NAME.asparam; empty: model_path with that ending.
  std::string weights_path;
  // "CPU:0": the whole CPU. "CPU_NUMA": the same, with each thread's part of weights and KV cache
  // on its own NUMA node; "CPU_NUMA:<ids>": these nodes. "CUDA:<ids>" needs a device that is built
  // in; without it, the model runs on CPU:0 and a warning is logged.
  std::string compute_unit = "CPU:0";
  // Most tokens (prompt + output) of one request.
  int64_t engine_max_length = 2048;
  // Most requests decoded in one step.
  int64_t engine_max_batch = 32;
  // Most prompt tokens prefilled in one step (the chunk); 0: 512.
  int64_t engine_max_prefill_length = 0;
  // What a step computes where prompts wait and others decode. kBalanced: decodes and prefill
  // together have a quarter of the chunk, prefill at least an eighth; kSmooth: a sixteenth and a
  // 32nd; kThroughput: all decodes and a whole chunk of prefill; kFirstToken: a whole chunk, and
  // decodes in every ninth step at least.
  PrefillPolicy prefill_policy = PrefillPolicy::kBalanced;
  // Compute threads; 0: one for each core that the process may use.
  int64_t num_threads = 0;
  MatmulPrecision matmul_precision = MatmulPrecision::kAny;
  // Tokens per KV block: 16, 32, 64 or 128. Like the next, it has DashInfer's name in Python and in
  // messages, where a block is a span: cache_span_size.
  int64_t block_size = 32;
  // KV blocks in the pool; 0: sized from max_batch x max_length, at most half the memory available.
  // cache_span_num_init.
  int64_t num_blocks = 0;
  // When blocks run out, the youngest request of the lowest priority ends as GenerateInterrupted
  // with the tokens so far. False: it is preempted, and gives the same tokens later.
  bool interrupt_on_cache_exhaustion = false;
  // Requests reuse KV blocks of other requests with the same prefix.
  bool enable_prefix_cache = true;
  // How many seconds unused blocks stay in the prefix cache; 0: only running requests share blocks.
  int64_t prefix_cache_ttl = 300;
  CacheMode cache_mode = CacheMode::kDefault;
  // Requests that may wait beyond the running batch, each sample of a best_of counted; 0: no bound.
  // More samples than the bound allows enter where nothing else runs.
  int64_t max_waiting_requests = 0;
  QueueFullPolicy queue_full_policy = QueueFullPolicy::kRefuse;
  // Most bytes for the output tensors of all waiting and running requests; a request that would
  // exceed it is denied. 0: an eighth of the memory of the machine or the cgroup.
  int64_t max_output_tensor_bytes = 0;
  // Longest time that a request waits for a token mask; one whose mask is later ends in error.
  int64_t token_mask_timeout_ms = 10000;
  // With speculative decoding (prompt_lookup_num_tokens, draft_model): most decoded and draft
  // tokens of one step. Below this number, a step computes the draft tokens that are worth their
  // cost. 0: no drafts.
  int64_t max_draft_rows = 64;
  // A smaller model of the same vocabulary that proposes draft tokens: the path of its .asgraph, or
  // the name of a memory image. Empty: none.
  std::string draft_model;
  // Most draft tokens for a request in one step.
  int64_t num_draft_tokens = 5;
  // 0: the model's own rope frequencies. 1 or more, for requests longer than the model was trained
  // for: the frequencies of dynamic NTK scaling with this factor at engine_max_length tokens. Every
  // request uses them, so that a token does not depend on how many tokens follow it.
  double rope_scaling_factor = 0.0;
  // Queries beyond the length the model was trained for are scaled by the logarithm of their
  // position, to the base of that length.
  bool use_logn_attn = false;
  // File to which StopModel writes a trace of the last steps and requests, in Chrome's trace
  // format; empty: no trace.
  std::string trace_path;
  // Measures each operation of a step, for GetOpProfilingInfo: two clock reads per operation.
  bool op_profiling = false;
  // Highest rank of an adapter's modules; most adapters loaded at a time, 0: none.
  int64_t lora_max_rank = 64;
  int64_t lora_max_num = 5;

  static constexpr auto Fields() {
    using C = RuntimeConfig;
    return std::make_tuple(
        Field{"model_name", &C::model_name}, Field{"model_path", &C::model_path},
        Field{"weights_path", &C::weights_path}, Field{"compute_unit", &C::compute_unit},
        Field{"engine_max_length", &C::engine_max_length, 2, 1 << 24},
        Field{"engine_max_batch", &C::engine_max_batch, 1, 65536},
        Field{"engine_max_prefill_length", &C::engine_max_prefill_length, 0, 1 << 20},
        Field{"prefill_policy", &C::prefill_policy}, Field{"num_threads", &C::num_threads, 0, 4096},
        Field{"matmul_precision", &C::matmul_precision},
        Field{"cache_span_size", &C::block_size, 16, 128},
        Field{"cache_span_num_init", &C::num_blocks, 0, 1 << 30},
        Field{"interrupt_on_cache_exhaustion", &C::interrupt_on_cache_exhaustion},
        Field{"enable_prefix_cache", &C::enable_prefix_cache},
        Field{"prefix_cache_ttl", &C::prefix_cache_ttl, 0, 1e9},
        Field{"cache_mode", &C::cache_mode},
        Field{"max_waiting_requests", &C::max_waiting_requests, 0, 1e9},
        Field{"queue_full_policy", &C::queue_full_policy},
        Field{"max_output_tensor_bytes", &C::max_output_tensor_bytes, 0, 1e15},
        Field{"token_mask_timeout_ms", &C::token_mask_timeout_ms, 1, 1e9},
        Field{"max_draft_rows", &C::max_draft_rows, 0, 1024}, Field{"draft_model", &C::draft_model},
        Field{"num_draft_tokens", &C::num_draft_tokens, 1, 64},
        Field{"rope_scaling_factor", &C::rope_scaling_factor, 0, 1e6},
        Field{"use_logn_attn", &C::use_logn_attn}, Field{"trace_path", &C::trace_path},
        Field{"op_profiling", &C::op_profiling}, Field{"lora_max_rank", &C::lora_max_rank, 1, 4096},
        Field{"lora_max_num", &C::lora_max_num, 0, 4096});
  }
  bool operator==(const RuntimeConfig&) const = default;
};

// The largest top_logprobs: likeliest tokens reported with each token.
inline constexpr int64_t kMaxTopLogprobs = 20;
// Bounds on stop_words_ids and on bad_words_ids: the entries, and the token ids of all entries.
inline constexpr int64_t kMaxWords = 200000;
inline constexpr int64_t kMaxWordIds = 2000000;
// The most sequences of one request.
inline constexpr int64_t kMaxSequences = 128;

// What one request asks for. Lengths are in tokens; max_length and min_length count prompt +
// output.
struct GenerationConfig {
  // False: greedy, the highest logit (lowest id among equals).
  bool do_sample = true;
  // Divides the logits; below 1e-5 means greedy.
  double temperature = 1.0;
  // Keeps the k highest logits; 0: all.
  int64_t top_k = 50;
  // Keeps the smallest set of tokens whose probability reaches top_p.
  double top_p = 1.0;
  // Keeps tokens at least min_p times as probable as the likeliest; 0: all.
  double min_p = 0.0;
  // Two requests with the same prompt, config and seed give the same tokens under any load;
  // -1: a random seed.
  int64_t seed = -1;
  // Prompt + output; 0: engine_max_length.
  int64_t max_length = 0;
  // Output tokens; 0: bounded by max_length alone.
  int64_t max_new_tokens = 0;
  // How many of the prompt's last tokens are the output of a request that ended early. They count
  // as output, so that this request continues with the tokens that the earlier one would have had.
  int64_t num_generated_in_prompt = 0;
  // No EOS, stop token or stop word ends the request before prompt + output reach this; 0: no
  // constraint.
  int64_t min_length = 0;
  // The same for the output alone; the later of the two counts.
  int64_t min_new_tokens = 0;
  // True: generation ends at the EOS token. False: it continues (stop words still end it).
  bool early_stopping = true;
  // True: the same as early_stopping False, and overrides it.
  bool ignore_eos = false;
  // -1: none.
  int64_t eos_token_id = -1;
  // Generation ends after any of these tokens, which stays in the output.
  std::vector<int64_t> stop_token_ids;
  // Generation ends after any of these id sequences, which stay in the output.
  std::vector<std::vector<int64_t>> stop_words_ids;
  // Id sequences that are never generated: a token that would complete one is masked.
  std::vector<std::vector<int64_t>> bad_words_ids;
  // Added to the logits of these tokens, [-100, 100] each.
  std::map<int64_t, double> logit_bias;
  // Divides positive logits and multiplies negative ones of tokens in prompt or output; 1: off.
  double repetition_penalty = 1.0;
  // True: repetition_penalty counts the output alone.
  bool suppress_repetition_in_generation = false;
  // Subtracted from the logits of tokens in the output.
  double presence_penalty = 0.0;
  // The same, once per occurrence.
  double frequency_penalty = 0.0;
  // No n-gram of this size occurs twice in prompt + output; 0: off.
  int64_t no_repeat_ngram_size = 0;
  // Generation ends when the last repetition_ngram_size tokens have occurred
  // repetition_ngram_threshold times in the output; either 0: off.
  int64_t repetition_ngram_size = 0;
  int64_t repetition_ngram_threshold = 0;
  // Speculative decoding by prompt lookup: most draft tokens per step. The output does not change,
  // only its speed where texts repeat; 0: off.
  int64_t prompt_lookup_num_tokens = 0;
  // False: do not use the model's draft model.
  bool use_draft_model = true;
  // True: the log-probability of each output token comes with it.
  bool logprobs = false;
  // Number of likeliest tokens reported with each token, with their log-probabilities. Without
  // logprobs and prompt_logprobs it has no effect.
  int64_t top_logprobs = 0;
  LogprobsMode logprobs_mode = LogprobsMode::kProcessed;
  // True: the log-probability of each prompt token but the first, of the model's own logits.
  bool prompt_logprobs = false;
  // The first prompt token with a log-probability; 0 and 1: all but the first token. Those before
  // it may come from the prefix cache.
  int64_t prompt_logprobs_start = 0;
  // True: nothing is generated; the request ends with the scores or tensors of its prompt, which
  // may be as long as max_length. Fields about output have no effect.
  bool prompt_only = false;
  // Matrices in GeneratedElements::tensors_from_model_inference.
  OutputRows output_logits = OutputRows::kNone;
  OutputRows output_last_hidden_state = OutputRows::kNone;
  // True: "hidden_states" as with output_last_hidden_state kAll, and "inputs_embedding": the input
  // of the first layer, including the position embedding and the scale of models that have these.
  bool enable_tensors_from_model_inference = false;
  // What is "embedding" among them.
  Pooling pooling = Pooling::kNone;
  // Whether the pooled embedding is divided by its Euclidean norm.
  bool normalize = true;
  // Above 1: a beam search with this many beams, which needs do_sample false. Sequences are ranked
  // by their score: the sum of the log-probabilities / output length ^ length_penalty.
  int64_t num_beams = 1;
  // Above 1: this many samples are generated, and the best returned, ranked by the same score.
  int64_t best_of = 1;
  // How many of the num_beams or best_of sequences are returned, best first, once all have ended.
  int64_t num_return_sequences = 1;
  double length_penalty = 1.0;
  EarlyStopping beam_early_stopping = EarlyStopping::kFalse;
  // Name of the loaded adapter to use; "": the base model.
  std::string lora_name;
  // Larger runs earlier; first come, first served within one priority.
  int64_t priority = 0;
  // Time from StartRequest after which the request ends with the tokens so far. 0: no limit.
  int64_t timeout_ms = 0;

  static constexpr auto Fields() {
    using C = GenerationConfig;
    return std::make_tuple(
        Field{"do_sample", &C::do_sample}, Field{"temperature", &C::temperature, 0, 1e6},
        Field{"top_k", &C::top_k, 0, 1 << 30}, Field{"top_p", &C::top_p, 0, 1},
        Field{"min_p", &C::min_p, 0, 1}, Field{"seed", &C::seed, -1, 9.2e18},
        Field{"max_length", &C::max_length, 0, 1 << 24},
        Field{"max_new_tokens", &C::max_new_tokens, 0, 1 << 24},
        Field{"num_generated_in_prompt", &C::num_generated_in_prompt, 0, 1 << 24},
        Field{"min_length", &C::min_length, 0, 1 << 24},
        Field{"min_new_tokens", &C::min_new_tokens, 0, 1 << 24},
        Field{"early_stopping", &C::early_stopping}, Field{"ignore_eos", &C::ignore_eos},
        Field{"eos_token_id", &C::eos_token_id, -1, 2147483647},
        Field{"stop_token_ids", &C::stop_token_ids}, Field{"stop_words_ids", &C::stop_words_ids},
        Field{"bad_words_ids", &C::bad_words_ids}, Field{"logit_bias", &C::logit_bias},
        Field{"repetition_penalty", &C::repetition_penalty, 0.01, 100},
        Field{"suppress_repetition_in_generation", &C::suppress_repetition_in_generation},
        Field{"presence_penalty", &C::presence_penalty, -2, 2},
        Field{"frequency_penalty", &C::frequency_penalty, -2, 2},
        Field{"no_repeat_ngram_size", &C::no_repeat_ngram_size, 0, 1 << 24},
        Field{"repetition_ngram_size", &C::repetition_ngram_size, 0, 1 << 24},
        Field{"repetition_ngram_threshold", &C::repetition_ngram_threshold, 0, 1 << 24},
        Field{"prompt_lookup_num_tokens", &C::prompt_lookup_num_tokens, 0, 64},
        Field{"use_draft_model", &C::use_draft_model}, Field{"logprobs", &C::logprobs},
        Field{"top_logprobs", &C::top_logprobs, 0, kMaxTopLogprobs},
        Field{"logprobs_mode", &C::logprobs_mode}, Field{"prompt_logprobs", &C::prompt_logprobs},
        Field{"prompt_logprobs_start", &C::prompt_logprobs_start, 0, 1 << 24},
        Field{"prompt_only", &C::prompt_only}, Field{"output_logits", &C::output_logits},
        Field{"output_last_hidden_state", &C::output_last_hidden_state},
        Field{"enable_tensors_from_model_inference", &C::enable_tensors_from_model_inference},
        Field{"pooling", &C::pooling}, Field{"normalize", &C::normalize},
        Field{"num_beams", &C::num_beams, 1, kMaxSequences},
        Field{"best_of", &C::best_of, 1, kMaxSequences},
        Field{"num_return_sequences", &C::num_return_sequences, 1, kMaxSequences},
        Field{"length_penalty", &C::length_penalty, -10, 10},
        Field{"beam_early_stopping", &C::beam_early_stopping}, Field{"lora_name", &C::lora_name},
        Field{"priority", &C::priority, -1000000, 1000000},
        Field{"timeout_ms", &C::timeout_ms, 0, 1e9});
  }
  bool operator==(const GenerationConfig&) const = default;
};

// Checks each field against its range; the message names field, value and bound.
Status Validate(const RuntimeConfig& config);
Status Validate(const GenerationConfig& config);
// "name=value" per field, in the order of Fields().
std::string ToString(const RuntimeConfig& config);
std::string ToString(const GenerationConfig& config);

}  // namespace allspark
