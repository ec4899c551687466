#include "engine/draft_model.h"

#include <algorithm>

namespace allspark {
namespace {

// A request may catch up on at least this many tokens in one step, even if its share of the chunk
// is less.
constexpr int64_t kLeastCatchUp = 16;
// How soon a rejected drafter is tried again: a try costs a step of the draft model, and the
// tokens that it has to catch up on.
constexpr double kFadingByStep = 1.0 / 256;
constexpr double kFadingByRequest = 1.0 / 32;

}  // namespace

Status DraftModelError(const RuntimeConfig& config, const Status& status) {
  return Status(status.code(), "draft_model is '" + config.draft_model +
                                   "', which cannot be used: " + status.message());
}

DecoderOptions DraftModel::DecoderOptionsOf(const DraftModelOptions& options) {
  DecoderOptions decoder = options.decoder;
  decoder.max_tokens =
      std::max(options.chunk_tokens, kLeastCatchUp * options.decoder.max_logits_rows);
  return decoder;
}

Result<std::unique_ptr<DraftModel>> DraftModel::Create(const ModelReader& weights,
                                                       const DraftModelOptions& options,
                                                       Device& device, DraftScratch scratch) {
  std::unique_ptr<DraftModel> model(new DraftModel(options, scratch));
  const DecoderOptions decoder_options = DecoderOptionsOf(options);
  AS_ASSIGN_OR_RETURN(model->decoder_, Decoder::Create(weights, decoder_options, device));
  AS_ASSIGN_OR_RETURN(model->kv_,
                      KvMemory::Create(device, model->decoder_->kv_shape(), options.num_blocks));
  const auto max_requests = static_cast<size_t>(options.decoder.max_logits_rows);
  model->requests_.reserve(max_requests);
  model->tokens_.reserve(static_cast<size_t>(decoder_options.max_tokens));
  model->positions_.reserve(static_cast<size_t>(decoder_options.max_tokens));
  model->sequences_.reserve(max_requests);
  model->rows_.reserve(max_requests);
  model->sampled_.reserve(max_requests);
  return model;
}

void DraftModel::Offer(Request& request) {
  if (!request.spec.uses_draft_model) return;
  DraftModelState& state = request.draft_model;
  if (state.is_new) {
    state.is_new = false;
    state.acceptance_rate = acceptance_rate_;
    acceptance_rate_.Fade(kFadingByRequest);
  }
  state.acceptance_rate.Fade(kFadingByStep);
  request.Offer({.drafter = this,
                 .num_drafts = options_.num_tokens,
                 .acceptance_rate = state.acceptance_rate.value(),
                 .cost = options_.cost});
}

// A request leaves the loop with its last draft, or while it still catches up.
void DraftModel::Draft(std::span<Request* const> requests) {
  requests_.assign(requests.begin(), requests.end());
  // A request with much to catch up on leaves the others their part of the chunk.
  const int64_t most =
      std::max(kLeastCatchUp, options_.chunk_tokens / static_cast<int64_t>(requests.size()));
  while (!requests_.empty()) {
    tokens_.clear(), positions_.clear(), sequences_.clear(), rows_.clear(), sampled_.clear();
    for (Request* request : requests_) AddSequence(*request, most);
    Forward();
    requests_.clear();
    for (size_t i = 0; i < rows_.size(); ++i) {
      // No token where no logit is finite; the target model may still find one.
      if (rows_[i].token < 0) continue;
      Request* request = sampled_[i];
      request->drafts.push_back(rows_[i].token);
      const auto num_drafts = static_cast<int64_t>(request->drafts.size());
      if (num_drafts < request->num_drafts) requests_.push_back(request);
    }
  }
}

// How many tokens of the request may be added: two sequences of a batch must not write a block that
// they share. The later one waits, and computes the same again.
int64_t DraftModel::TokensApart(const Request& request, int64_t num_tokens) const {
  const int64_t block_size = options_.decoder.block_size;
  const int64_t begin = request.draft_model.num_computed;
  for (const BatchSequence& other : sequences_) {
    const int64_t other_end = other.position + other.num_tokens;
    for (int64_t i = std::max(begin, other.position) / block_size;
         i * block_size < std::min(begin + num_tokens, other_end); ++i) {
      if (request.block_table[static_cast<size_t>(i)] == other.block_table[i]) {
        num_tokens = std::max<int64_t>(0, i * block_size - begin);
      }
    }
  }
  return num_tokens;
}

void DraftModel::AddSequence(Request& request, int64_t most) {
  DraftModelState& state = request.draft_model;
  if (state.num_preemptions != request.num_preemptions) {
    state.num_preemptions = request.num_preemptions;
    state.num_computed = 0;
  }
  const int64_t end = request.num_tokens + static_cast<int64_t>(request.drafts.size());
  BatchSequence sequence{
      .token_begin = static_cast<int64_t>(tokens_.size()),
      .num_tokens = TokensApart(request, std::min(most, end - state.num_computed)),
      .position = state.num_computed,
      .block_table = request.block_table.data()};
  if (sequence.num_tokens == 0) return;
  for (int64_t i = 0; i < sequence.num_tokens; ++i, ++state.num_computed) {
    tokens_.push_back(request.KnownOrDrafted(state.num_computed));
    positions_.push_back(static_cast<int32_t>(state.num_computed));
  }
  if (state.num_computed == end) {
    sequence.logits_row = static_cast<int32_t>(rows_.size());
    // Sampled with the random number that the target model will use at this position: where the two
    // models have the same distribution, they choose the same token.
    rows_.push_back({.params = &request.spec.sampling,
                     .logits = scratch_.logits.row(sequence.logits_row),
                     .position = end});
    sampled_.push_back(&request);
  }
  sequences_.push_back(sequence);
}

void DraftModel::Forward() {
  const Batch batch{.tokens = tokens_.data(),
                    .positions = positions_.data(),
                    .num_tokens = static_cast<int64_t>(tokens_.size()),
                    .sequences = sequences_.data(),
                    .num_sequences = static_cast<int64_t>(sequences_.size()),
                    .num_logits_rows = static_cast<int64_t>(rows_.size())};
  scratch_.arena.Reset();
  decoder_->Forward(batch, kv_.pool(), scratch_.arena, scratch_.logits.row(0));
  scratch_.sampler.Sample(rows_.data(), static_cast<int64_t>(rows_.size()));
}

void DraftModel::WarmUp() {
  // One token reads all weights.
  const int32_t block = 0;
  const SamplingParams greedy;
  tokens_ = {0};
  positions_ = {0};
  sequences_ = {{.num_tokens = 1, .block_table = &block, .logits_row = 0}};
  rows_ = {{.params = &greedy, .logits = scratch_.logits.row(0)}};
  Forward();
}

void DraftModel::Verified(Request& request, int64_t accepted) {
  DraftModelState& state = request.draft_model;
  const auto drafted = static_cast<int64_t>(request.drafts.size());
  for (int64_t i = 0; i < std::min(accepted + 1, drafted); ++i) {
    state.acceptance_rate.Seen(i < accepted);
    acceptance_rate_.Seen(i < accepted);
  }
  // At most all tokens but the newest count as computed; rejected drafts do not.
  state.num_computed = std::min(state.num_computed, request.num_tokens - 1);
}

}  // namespace allspark
