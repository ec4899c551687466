// Drafts by a second, smaller model of the same vocabulary. Its KV cache has a block for each block
// of the target model, under the same id, so one block table serves both models. Before it drafts,
// the draft model computes in chunks the tokens of a request that it has not seen: the prompt, and
// tokens decoded without drafts. Requests that share a block each compute the draft model's part of
// it, and write the same bits.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/drafter.h"
#include "engine/logits_buffer.h"
#include "memory/step_arena.h"
#include "model/decoder.h"
#include "ops/kv_memory.h"

namespace allspark {

struct DraftModelOptions {
  DecoderOptions decoder;    // max_logits_rows: the most requests of a step; no max_tokens
  int64_t num_blocks = 0;    // as many as the target model's
  int64_t num_tokens = 0;    // most draft tokens for a request in one step
  int64_t chunk_tokens = 0;  // about how many tokens catch up in one step
  double cost = 0;           // of a draft model's step, in steps of the target model
};

// Scratch memory that a step lends to its drafters, until the step's own batch is computed.
struct DraftScratch {
  StepArena& arena;
  LogitsBuffer& logits;  // max_logits_rows rows
  Sampler& sampler;
};

// A status that says why the draft model cannot be used, with its name.
Status DraftModelError(const RuntimeConfig& config, const Status& status);

class DraftModel : public Drafter {
 public:
  // `weights`, the references of `scratch`, and `device` outlive it.
  static Result<std::unique_ptr<DraftModel>> Create(const ModelReader& weights,
                                                    const DraftModelOptions& options,
                                                    Device& device, DraftScratch scratch);

  // The options of its decoder.
  static DecoderOptions DecoderOptionsOf(const DraftModelOptions& options);

  int64_t arena_bytes() const { return decoder_->arena_bytes(); }
  void WarmUp() override;
  void Offer(Request& request) override;
  void Draft(std::span<Request* const> requests) override;
  void Verified(Request& request, int64_t accepted) override;

 private:
  DraftModel(const DraftModelOptions& options, DraftScratch scratch)
      : options_(options), scratch_(scratch) {}

  // Adds the tokens of the request that the draft model has not computed to the batch, at most
  // `most`.
  void AddSequence(Request& request, int64_t most);
  int64_t TokensApart(const Request& request, int64_t num_tokens) const;
  void Forward();

  DraftModelOptions options_;
  // Of all requests; new ones start with it.
  AcceptanceRate acceptance_rate_{DraftModelState::kWeight};
  DraftScratch scratch_;
  std::unique_ptr<Decoder> decoder_;
  KvMemory kv_;
  // One batch, reserved for the largest.
  std::vector<Request*> requests_;  // those that still draft
  std::vector<int32_t> tokens_, positions_;
  std::vector<BatchSequence> sequences_;
  std::vector<SamplingRow> rows_;
  std::vector<Request*> sampled_;  // by row
};

}  // namespace allspark
