// One accepted request: what it asks for, what the scheduler sees of it, and its state. All its
// memory is allocated on the caller's thread, so that the step thread allocates nothing for it.
// From Submit to its end the step thread alone touches the state.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "allspark/config.h"
#include "engine/admission.h"
#include "engine/lora_registry.h"
#include "engine/mask_reader.h"
#include "engine/output_tensors.h"
#include "engine/request_group.h"
#include "engine/request_spec.h"
#include "engine/result_queue_impl.h"
#include "engine/text_state.h"
#include "sampling/prompt_lookup.h"
#include "sampling/sampler.h"
#include "scheduler/scheduler.h"

namespace allspark {

class Drafter;  // engine/drafter.h

// What a drafter could draft for a request in the current step.
struct DraftOffer {
  Drafter* drafter = nullptr;
  int64_t num_drafts = 0;
  double acceptance_rate = 0;  // the chance that a draft is accepted if those before it are
  double cost = 0;             // see ScheduledSequence::draft_cost
};

// What a draft model remembers of a request.
struct DraftModelState {
  bool is_new = true;
  int64_t num_computed = 0;     // tokens whose KV is in its cache
  int64_t num_preemptions = 0;  // of the request at that time: after another one its blocks differ
  // Low: a few rejected drafts in a row must not stop drafting, since the rate recovers slowly
  // without drafts.
  static constexpr double kWeight = 1.0 / 16;
  AcceptanceRate acceptance_rate{kWeight};
};

// Whether an output that ended for this reason is complete.
inline bool IsOutput(FinishReason reason) {
  return reason == FinishReason::kStop || reason == FinishReason::kLength;
}

// The first base is the scheduler's view; num_tokens there equals tokens.size().
struct Request : ScheduledSequence, TextState {
  // Checks as RequestSpec::Create does. If the config asks for a group, the request is its first
  // member.
  static Result<std::shared_ptr<Request>> Create(uint64_t request_id,
                                                 std::span<const int64_t> prompt_ids,
                                                 const GenerationConfig& config,
                                                 const RequestLimits& limits,
                                                 std::shared_ptr<CompletionSetImpl> engine_set,
                                                 std::shared_ptr<TokenMask> token_mask = nullptr);

  Request(RequestSpec checked, std::span<const int64_t> prompt_ids, const RequestLimits& limits,
          std::shared_ptr<OutputTensors> wanted_outputs,
          const std::shared_ptr<CompletionSetImpl>& engine_set);

  // The request that a sequence of an engine's scheduler is.
  static Request* Of(ScheduledSequence* sequence) { return static_cast<Request*>(sequence); }
  static const Request* Of(const ScheduledSequence* sequence) {
    return static_cast<const Request*>(sequence);
  }

  // Sets the adapter of the request and its group, before Submit; null: the base model.
  void UseLora(std::shared_ptr<const LoadedLora> loaded);

  // Forgets the offers of the last step.
  void ClearOffers();
  // Takes the best offer: that of the highest acceptance rate less cost.
  void Offer(const DraftOffer& offer);
  int32_t KnownOrDrafted(int64_t position) const;
  // Whether the token just appended is the next draft. If not, the step's drafts are over.
  bool TakeDraft();
  void EndDrafts();
  // Appends a sampled token; returns why the request ends now, or kNone.
  FinishReason Append(int32_t token);
  // What Append would return.
  FinishReason ReasonAfter(int32_t token);
  // What the sampler needs to choose the next token; points into this request.
  SamplingRow NextRow(float* logits);
  // Whether the request wants outputs besides sampled tokens.
  bool WantsOutputs() const { return spec.scores_prompt || outputs != nullptr; }
  // Where the logits of a position are wanted; null: nowhere.
  float* LogitsRow(int64_t position) const {
    return outputs != nullptr ? outputs->logits().Row(position) : nullptr;
  }
  // A chunk of its prompt is about to be computed; the first call notes the time.
  void OnScheduled(int64_t now_us, int64_t num_cached, int64_t num_on_host);
  // Delivers the token that was chosen for NextRow; a member of a group keeps its log-probability.
  void Deliver(int32_t token, int64_t now_us);
  // Ends the request or its whole group: frees everything but the queues, which get the reason.
  void Finish(FinishReason reason, const std::string& error, int64_t now_us);
  // Frees everything but the queue.
  void ReleaseResources();

  // What a beam passes to those that continue it.
  TextState& text() { return *this; }
  bool is_beam() const { return group != nullptr && group->is_search(); }
  // Whether it is the request that a caller started: a single one, or the first of a group.
  bool stands_for_all() const { return group == nullptr || group->first() == this; }
  int64_t arrival_us() const { return queue->arrival_us(); }
  // Output tokens; for a group those of its longest sequence.
  int64_t output_length() const {
    return group != nullptr ? group->longest_output() : num_tokens - spec.prompt_length;
  }
  bool is_sample() const { return group != nullptr && !group->is_search(); }
  // The request's share of the model's bounds; the samples of a group leave one by one.
  Admission::Share share() const {
    return {.num_requests = group != nullptr ? group->num_live() : 1,
            .tensor_bytes = outputs != nullptr ? outputs->bytes() : 0};
  }

  const RequestSpec spec;

  // Constant after Create.
  std::shared_ptr<ResultQueueImpl> queue;
  RequestGroup* group = nullptr;              // null: it is in none
  std::unique_ptr<RequestGroup> owned_group;  // in the group's first member

  // The step thread's.
  std::shared_ptr<OutputTensors> outputs;  // null: no tensors are wanted
  std::shared_ptr<const LoadedLora> lora;  // null: none
  std::unique_ptr<MaskReader> mask;        // null: every token may be chosen
  int64_t mask_deadline_us = 0;            // of the mask that is awaited; 0: not awaited yet
  DraftModelState draft_model;
  PromptLookup lookup;          // follows `tokens`
  Drafter* drafter = nullptr;   // whose offer was the best; null: nobody's
  std::vector<int32_t> drafts;  // num_drafts tokens, of the current step; capacity is reserved
  size_t num_taken = 0;         // accepted ones of drafts
  // Times of its first step, first and last token. 0: not yet; in a group, tokens have no times.
  int64_t scheduled_us = 0, first_token_us = 0, last_token_us = 0;
  RowLogprobs logprobs;     // of the newest token
  int64_t num_written = 0;  // positions whose wanted outputs are all written
  // Of a member of a group.
  RowCandidates candidates;
  bool has_candidates = false;
  double sum_logprobs = 0;
  std::shared_ptr<Request> self;  // keeps it alive from Submit to its end
  bool joined = false;            // the scheduler has it: it has left the mailbox

  // Guarded by the instance's mailbox mutex.
  bool ended = false;
  Request* next_new = nullptr;
  Request* next_stop = nullptr;
  std::shared_ptr<Request> stop_self;                   // keeps it alive while in the list of stops
  FinishReason stop_reason = FinishReason::kCancelled;  // set before it enters that list

 private:
  // Sets `words` to the states after the prompt.
  void ReadPromptWords();
  // `words` after one more token, at `position`.
  WordStates NextWords(int32_t token, int64_t position) const;
  // About the newest token, which `repeats` does not follow yet.
  bool IsAtEnd() const;
  FinishReason Reason() const;
};

// Whether a chunk computes a token that was generated, not the end of a prompt.
inline bool IsDecode(const PlannedChunk& chunk) {
  const Request* request = Request::Of(chunk.sequence);
  return chunk.samples && chunk.num_tokens == 1 + chunk.num_drafts &&
         chunk.begin >= request->spec.prompt_length;
}

}  // namespace allspark
