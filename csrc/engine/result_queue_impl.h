// The queue behind ResultQueue: a token buffer reserved when the request starts, a cursor of what
// has been delivered, and the request's status and times. The step thread writes, any thread reads.
#pragma once

#include <condition_variable>
#include <memory>
#include <optional>
#include <span>

#include "allspark/result_queue.h"
#include "base/mutex.h"
#include "engine/completion_set.h"
#include "engine/output_tensors.h"
#include "platform/home_process.h"
#include "sampling/logprobs.h"

namespace allspark {

// What a queue is reserved for, so that the step thread never allocates.
struct QueueCapacity {
  int64_t tokens = 0;  // most output tokens
  bool logprobs = false;
  bool prompt_logprobs = false;
  int64_t scored_begin = 0;  // with prompt_logprobs: the position before the first of them
  int64_t top_logprobs = 0;  // for each token
};

class ResultQueueImpl final : public ResultQueue,
                              public std::enable_shared_from_this<ResultQueueImpl> {
 public:
  // outputs: the tensors whose rows come with the elements; or null.
  ResultQueueImpl(uint64_t request_id, int64_t prompt_tokens, const QueueCapacity& capacity,
                  std::shared_ptr<CompletionSetImpl> engine_set,
                  std::shared_ptr<const OutputTensors> outputs = nullptr);
  ~ResultQueueImpl() override;
  // Deletes a queue. In a fork it does nothing: threads that do not exist there may wait on the
  // queue.
  static void Delete(ResultQueueImpl* queue);

  GenerateRequestStatus GenerateStatus() const override;
  FinishReason finish_reason() const override;
  size_t GeneratedLength() const override;
  std::string error() const override;
  std::map<std::string, int64_t> RequestStatInfo() const override;
  uint64_t request_id() const override { return request_id_; }
  int64_t arrival_us() const { return arrival_us_; }
  std::optional<double> sequence_score() const override;
  std::optional<GeneratedElements> Get() override;
  std::optional<GeneratedElements> Get(int64_t timeout_ms) override;
  std::optional<GeneratedElements> GetNoWait() override;

  // For the step thread. Announce wakes those who wait for this queue, and adds the completion sets
  // whose readers are to be woken to `unsignalled`; Finish does it and signals them.
  // A chunk of the prompt is about to be computed, after num_cached tokens that the prefix cache
  // had. num_on_host: how many of these had their blocks in the host's memory.
  void OnScheduled(int64_t now_us, int64_t num_cached, int64_t num_on_host);
  // Of the prompt token after `position`. All of them come before the first Append.
  void SetPromptLogprobs(int64_t position, const RowLogprobs& logprobs);
  // logprobs: of the token; null unless the queue was made for them.
  void Append(int32_t token, const RowLogprobs* logprobs, int64_t now_us);
  // All of an output at once. `logprobs` are read where the queue was made for them.
  void AppendRanked(std::span<const int32_t> tokens, const OutputLogprobs& logprobs, double score,
                    int64_t now_us);
  void OnDrafts(int64_t drafted, int64_t accepted);
  void Finish(FinishReason reason, const std::string& error, int64_t now_us);
  void Announce(CompletionSets& unsignalled);

  // Blocks until terminal; false on timeout, which is at most kLongestWaitMs. In a fork: at once.
  bool WaitTerminal(int64_t timeout_ms);
  void AttachSet(std::shared_ptr<CompletionSetImpl> set, bool only_end);

 private:
  bool Readable() const AS_REQUIRES(mutex_) {
    return delivered_ < tokens_.size() || IsTerminal(status_);
  }
  // The number of positions whose outputs are complete. Outputs are delivered with the token chosen
  // from the last of them, or with the end of a prompt_only request.
  int64_t NumPositionsLocked() const AS_REQUIRES(mutex_);
  std::optional<GeneratedElements> TakeLocked() AS_REQUIRES(mutex_);
  std::vector<std::vector<std::pair<int64_t, float>>> TopLocked(const OutputLogprobs& logprobs,
                                                                size_t begin) const;
  // Calls on_set(set) for each set that is to be signalled.
  template <class OnSet>
  void AnnounceLocked(const OnSet& on_set) AS_REQUIRES(mutex_);

  // Constant after construction.
  const HomeProcess home_;
  const uint64_t request_id_;
  const int64_t prompt_tokens_;
  const QueueCapacity capacity_;
  const std::shared_ptr<CompletionSetImpl> engine_set_;
  const int64_t arrival_us_;
  const std::shared_ptr<const OutputTensors> outputs_;

  mutable Mutex mutex_;
  std::condition_variable changed_;
  int num_waiters_ AS_GUARDED_BY(mutex_) = 0;
  GenerateRequestStatus status_ AS_GUARDED_BY(mutex_) = GenerateRequestStatus::kInit;
  FinishReason reason_ AS_GUARDED_BY(mutex_) = FinishReason::kNone;
  std::string error_ AS_GUARDED_BY(mutex_);
  std::vector<int32_t> tokens_ AS_GUARDED_BY(mutex_);
  // Where wanted.
  OutputLogprobs output_logprobs_ AS_GUARDED_BY(mutex_), prompt_logprobs_ AS_GUARDED_BY(mutex_);
  std::optional<double> score_ AS_GUARDED_BY(mutex_);
  size_t delivered_ AS_GUARDED_BY(mutex_) = 0;
  int64_t delivered_positions_ AS_GUARDED_BY(mutex_) = 0;
  int64_t cached_ AS_GUARDED_BY(mutex_) = 0, cached_on_host_ AS_GUARDED_BY(mutex_) = 0;
  int64_t drafted_ AS_GUARDED_BY(mutex_) = 0, accepted_ AS_GUARDED_BY(mutex_) = 0;
  int64_t scheduled_us_ AS_GUARDED_BY(mutex_) = 0, first_token_us_ AS_GUARDED_BY(mutex_) = 0;
  int64_t last_token_us_ AS_GUARDED_BY(mutex_) = 0, finished_us_ AS_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<CompletionSetImpl> attached_set_ AS_GUARDED_BY(mutex_);
  bool attached_only_end_ AS_GUARDED_BY(mutex_) = false;
  // The fields besides `queue` are their sets'.
  CompletionHook engine_hook_, attached_hook_;
};

}  // namespace allspark
