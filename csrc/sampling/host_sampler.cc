#include "sampling/host_sampler.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "sampling/philox.h"

namespace allspark {
namespace {

// Below this a draw could only choose among the highest logits, and dividing by it would overflow.
constexpr float kGreedyTemperature = 1e-5f;

// Masks of a grammar have long runs of words that are all off or all on.
void ApplyMask(const uint32_t* mask, int64_t vocab_size, float* logits) {
  for (int64_t begin = 0; begin < vocab_size; begin += 32) {
    const uint32_t word = mask[begin / 32];
    if (word == ~uint32_t{0}) continue;
    const int64_t end = std::min(begin + 32, vocab_size);
    for (int64_t i = begin; i < end; ++i) {
      if ((word >> (i - begin) & 1) == 0) logits[i] = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace

HostSampler::HostSampler(int64_t vocab_size, const kernels::KernelTable& kernels, ThreadPool* pool)
    : vocab_size_(vocab_size), kernels_(kernels), pool_(pool) {
  AS_CHECK(vocab_size >= 1 && vocab_size <= std::numeric_limits<int32_t>::max())
      << "vocab_size is " << vocab_size << ", outside [1, 2^31 - 1]";
  AS_CHECK(kernels.argmax != nullptr && kernels.sum_exp != nullptr)
      << "kernel table '" << kernels.name << "' has no argmax or no sum_exp";
  const int num_threads = pool != nullptr ? pool->num_threads() : 1;
  const size_t size = static_cast<size_t>(vocab_size) * static_cast<size_t>(num_threads);
  // Not filled: pages that are not written take no memory.
  scratch_ = std::make_unique_for_overwrite<TokenCandidate[]>(size);
  raw_logits_ = std::make_unique_for_overwrite<float[]>(size);
}

void HostSampler::Sample(SamplingRow* rows, int64_t num_rows) {
  const auto sample = [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) SampleRow(rows[i], thread);
  };
  if (pool_ != nullptr) {
    pool_->ParallelFor(num_rows, 1, sample);
  } else {
    sample(0, num_rows, 0);
  }
}

void HostSampler::SampleRow(SamplingRow& row, int thread) {
  if (row.candidates != nullptr) {
    RankRow(row, thread);
    return;
  }
  float* const raw_logits = raw_logits_.get() + thread * vocab_size_;
  const bool raw_logprobs = row.logprobs != nullptr && row.logprobs->raw;
  if (raw_logprobs) std::copy_n(row.logits, vocab_size_, raw_logits);
  Process(row);
  row.token = Choose(row, scratch_.get() + thread * vocab_size_);
  if (row.logprobs != nullptr && row.token >= 0) {
    ComputeLogprobs(kernels_, raw_logprobs ? raw_logits : row.logits, vocab_size_, row.token,
                    *row.logprobs);
  }
}

// As in transformers' beam search, logits processors are applied to log-probabilities here.
void HostSampler::RankRow(SamplingRow& row, int thread) {
  LogSoftmax(kernels_, row.logits, vocab_size_);
  float* reported = row.logits;
  if (row.logprobs != nullptr && row.logprobs->raw) {
    reported = raw_logits_.get() + thread * vocab_size_;
    std::copy_n(row.logits, vocab_size_, reported);
  }
  Process(row);
  RowCandidates& candidates = *row.candidates;
  FindTop(row.logits, vocab_size_, candidates.top);
  for (size_t i = 0; i < candidates.top.size(); ++i) {
    const int32_t token = candidates.top[i].token;
    if (token >= 0) candidates.reported[i] = reported[token];
  }
  if (row.logprobs != nullptr) FindTop(reported, vocab_size_, row.logprobs->top);
}

void HostSampler::Process(const SamplingRow& row) const {
  row.edits.ForEach([&](const LogitEdit& edit) {
    AS_CHECK(edit.token >= 0 && edit.token < vocab_size_)
        << "token id is " << edit.token << ", outside [0, " << vocab_size_ << ")";
    float& logit = row.logits[edit.token];
    logit = edit.Of(logit);
  });
  if (row.mask != nullptr) ApplyMask(row.mask, vocab_size_, row.logits);
}

int32_t HostSampler::Choose(const SamplingRow& row, TokenCandidate* scratch) const {
  const SamplingParams& params = *row.params;
  if (params.greedy || !(params.temperature >= kGreedyTemperature)) return ArgMax(row.logits);
  const TokenFilter filter{.temperature = params.temperature,
                           .top_k = params.top_k,
                           .top_p = params.top_p,
                           .min_p = params.min_p};
  return ChooseToken(row.logits, vocab_size_, filter, PositionUniform(params.seed, row.position),
                     scratch);
}

int32_t HostSampler::ArgMax(const float* logits) const {
  int32_t token = -1;
  kernels_.argmax(
      {.x = logits, .ldx = vocab_size_, .rows = 1, .cols = vocab_size_, .index = &token});
  // A row without any finite logit has no highest one; NaN fails the comparison too.
  return token >= 0 && logits[token] > -std::numeric_limits<float>::infinity() ? token : -1;
}

}  // namespace allspark
