// Log-probabilities of one row of logits: log-softmax over the whole vocabulary. Pure functions;
// any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernel_table.h"

namespace allspark {

struct TokenLogprob {
  int32_t token = -1;  // -1: no token left
  float logprob = 0;
};

// What a row asks for, and what it gets.
struct RowLogprobs {
  bool raw = false;  // of the model's own logits; else as the choice saw them, before temperature
  // As many of the likeliest as it has elements, in order of (logit descending, id ascending);
  // where fewer tokens have any probability, the rest have token -1.
  std::vector<TokenLogprob> top;
  float chosen = 0;  // of the chosen token
};

// A row's likeliest continuations, for a beam search.
struct RowCandidates {
  // As RowLogprobs::top, of the processed log-probabilities: here logits processors are applied
  // after the log-softmax, and their result is not normalised again.
  std::vector<TokenLogprob> top;
  std::vector<float> reported;  // RowLogprobs::chosen if that candidate is chosen
};

// The log-probabilities of the tokens of one output, and the likeliest tokens at each of their
// positions.
struct OutputLogprobs {
  std::vector<float> chosen;
  std::vector<TokenLogprob> top;

  // Room for so many tokens with num_top of the likeliest each.
  void Reserve(int64_t num_tokens, int64_t num_top) {
    chosen.reserve(static_cast<size_t>(num_tokens));
    top.reserve(static_cast<size_t>(num_tokens * num_top));
  }
  // Of the next token.
  void Add(float logprob, std::span<const TokenLogprob> likeliest) {
    chosen.push_back(logprob);
    top.insert(top.end(), likeliest.begin(), likeliest.end());
  }
};

// The highest values, as many as `top` has elements, in order of (value descending, index
// ascending); where fewer are above -inf, the rest have token -1. Returns how many are.
size_t FindTop(const float* values, int64_t vocab_size, std::vector<TokenLogprob>& top);

// In place. Nothing above -inf: the row stays as it is.
void LogSoftmax(const kernels::KernelTable& kernels, float* logits, int64_t vocab_size);

// logits: [vocab_size]. NaN counts as -inf; +inf logits share all probability. A token without
// probability has logprob -inf.
void ComputeLogprobs(const kernels::KernelTable& kernels, const float* logits, int64_t vocab_size,
                     int32_t token, RowLogprobs& result);

}  // namespace allspark
