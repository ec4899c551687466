// ResultQueue: the results of a request, readable from any thread at any time.
//
// A queue is owned by the holders of its shared_ptr: it stays readable after release_request, after
// stop_model and after the Engine is gone. The engine's step thread appends; any number of threads
// may read, and each token is delivered once. In a fork of the engine's process the queue has
// ended: kInternalError, and error() says why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "allspark/status.h"

namespace [[gnu::visibility("default")]] allspark {

// The values are DashInfer's.
enum class GenerateRequestStatus : int {
  kInit = 0,
  kContextFinished = 1,
  kGenerating = 2,
  kGenerateFinished = 3,
  kGenerateInterrupted = 4,
  kInternalError = 5,
};
inline bool IsTerminal(GenerateRequestStatus s) {
  return s >= GenerateRequestStatus::kGenerateFinished;
}

enum class FinishReason : int {
  kNone = 0,         // still running
  kStop = 1,         // EOS, stop token, stop word, repeated n-gram, or its token mask is finished
  kLength = 2,       // max_length, max_new_tokens, engine_max_length; end of a prompt_only request
  kCancelled = 3,    // stop_request, release_request or stop_model
  kInterrupted = 4,  // never fits the KV cache; interrupt_on_cache_exhaustion: no blocks left
  kError = 5,        // a failure inside a step; see ResultQueue::error()
  kDeadline = 6,     // timeout_ms was over
};
// "", "stop", "length", "cancelled", "interrupted", "error", "deadline".
std::string_view FinishReasonName(FinishReason reason);

// A matrix or vector of float32, row-major, in host memory. It shares the ownership of its
// elements: they outlive queue, request and engine, and nobody else touches them.
struct OutputTensor {
  std::shared_ptr<float> data;
  std::vector<int64_t> shape;
};

// Everything that came since the last getter call.
struct GeneratedElements {
  std::vector<int64_t> ids_from_generate;
  // Empty unless asked for: [token][top_logprobs] of (token id, log-probability), likeliest first,
  // fewer if fewer tokens could be chosen; and the log-probability of each token.
  std::vector<std::vector<std::pair<int64_t, float>>> log_probs_list;
  std::vector<float> token_logprobs_list;
  // The same for the prompt's tokens but the first. Only in the first elements; empty unless asked
  // for.
  std::vector<std::vector<std::pair<int64_t, float>>> prompt_log_probs_list;
  std::vector<float> prompt_token_logprobs_list;
  // Empty or one map of the tensors asked for: "hidden_states" and "inputs_embedding" [rows,
  // hidden_size] and "logits" [rows, vocab_size], whose rows continue those of the previous
  // elements; and "embedding" [hidden_size], only in the first elements.
  std::vector<std::map<std::string, OutputTensor>> tensors_from_model_inference;
  // Prompt tokens from the prefix cache: in all, in device memory, in host memory.
  int64_t prefix_cache_len = 0;
  int64_t prefix_len_gpu = 0;
  int64_t prefix_len_cpu = 0;
};

class ResultQueue {
 public:
  virtual ~ResultQueue() = default;

  // Never block.
  virtual GenerateRequestStatus GenerateStatus() const = 0;
  virtual FinishReason finish_reason() const = 0;
  virtual size_t GeneratedLength() const = 0;  // Output tokens so far, delivered or not.
  // The reason of kInternalError, or empty.
  virtual std::string error() const = 0;
  // Keys as in docs/observability.md; times in ms, lengths in tokens.
  virtual std::map<std::string, int64_t> RequestStatInfo() const = 0;
  virtual uint64_t request_id() const = 0;
  // The score of the sequence once it has ended; nullopt with num_beams and best_of 1.
  virtual std::optional<double> sequence_score() const = 0;

  // Blocks until new tokens or a terminal status. Returns nullopt once the request is terminal
  // and every token has been delivered.
  virtual std::optional<GeneratedElements> Get() = 0;
  // As Get, but gives up after timeout_ms and returns nullopt; <= 0 polls once.
  virtual std::optional<GeneratedElements> Get(int64_t timeout_ms) = 0;
  // Returns nullopt when nothing new is there.
  virtual std::optional<GeneratedElements> GetNoWait() = 0;
};

// A set of queues that changed, behind one pollable descriptor. Each engine has one; an event
// loop may make its own and attach queues to it. Any thread may call.
class CompletionSet : public std::enable_shared_from_this<CompletionSet> {
 public:
  static std::shared_ptr<CompletionSet> Create();
  virtual ~CompletionSet() = default;

  // An eventfd, readable while a changed queue waits to be drained. Owned by this object.
  virtual int fd() const = 0;
  // Returns each queue that got a token or a terminal status since the last drain, once, and
  // makes fd() unreadable. Queues nobody holds any more are left out. Empty in a fork of the
  // process that created the set.
  virtual std::vector<std::shared_ptr<ResultQueue>> Drain() = 0;
  // From now on changes of `queue` are signalled here too; signalled at once if it already has
  // something to read. With only_end the terminal status alone is signalled, so a reader of whole
  // outputs is not woken for each token. A queue has at most one attached set; a second call
  // replaces the first.
  virtual void Attach(const std::shared_ptr<ResultQueue>& queue, bool only_end = false) = 0;
};

}  // namespace allspark
