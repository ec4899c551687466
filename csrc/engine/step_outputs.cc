#include "engine/step_outputs.h"

#include <algorithm>

#include "base/check.h"

namespace allspark {

StepOutputs::StepOutputs(int64_t max_batch, int64_t max_tokens, int64_t max_logits_rows,
                         const kernels::KernelTable& kernels)
    : kernels_(kernels), scores_(static_cast<size_t>(max_logits_rows)) {
  parts_.reserve(static_cast<size_t>(max_batch));
  rows_.reserve(static_cast<size_t>(max_tokens));
  row_tokens_.reserve(static_cast<size_t>(max_tokens));
  for (RowLogprobs& score : scores_) score.top.reserve(kMaxTopLogprobs);
}

void StepOutputs::Clear() {
  parts_.clear();
  rows_.clear();
  row_tokens_.clear();
}

void StepOutputs::Add(Request* request, const PlannedChunk& chunk, int64_t token_begin,
                      const float* sampled) {
  if (!request->WantsOutputs()) return;
  // Rows that were written before a preemption may be in a reader's hands.
  const int64_t begin = std::max(chunk.begin, request->num_written);
  const int64_t end = chunk.begin + chunk.num_tokens;
  request->num_written = std::max(request->num_written, end - chunk.num_drafts);
  if (begin >= end) return;
  const int64_t sampled_begin = sampled != nullptr ? request->num_tokens - 1 : end;
  const int64_t token_offset = token_begin - chunk.begin;
  for (int64_t position = begin; position < sampled_begin; ++position) {
    if (!request->spec.IsScored(position) && request->LogitsRow(position) == nullptr) continue;
    rows_.push_back({request, position});
    row_tokens_.push_back(token_offset + position);
  }
  if (request->outputs == nullptr) return;
  parts_.push_back({request, begin, end, token_offset + begin, sampled, sampled_begin});
}

void StepOutputs::WriteStates(const Part& part, Decoder& decoder, LogitsBuffer& logits) {
  OutputTensors& outputs = *part.request->outputs;
  const auto token_of = [&](int64_t position) { return part.token_begin + position - part.begin; };
  const auto write = [&](const PositionRows& rows, auto compute) {
    const int64_t begin = std::max(part.begin, rows.begin), end = std::min(part.end, rows.end);
    if (begin < end) compute(token_of(begin), end - begin, rows.Row(begin));
  };
  write(outputs.hidden_states(),
        [&](int64_t token, int64_t count, float* to) { decoder.HiddenStates(token, count, to); });
  write(outputs.inputs_embedding(), [&](int64_t token, int64_t count, float* to) {
    decoder.InputEmbeddings(token, count, to);
  });
  for (int64_t position = part.begin; position < part.end; ++position) {
    float* const pooled = outputs.PooledRow(position);
    if (pooled == nullptr) continue;
    decoder.HiddenStates(token_of(position), 1, pooled);
    outputs.Pool(position);
  }
  const int64_t vocab_size = decoder.vocab_size();
  for (int64_t position = part.sampled_begin; position < part.end; ++position) {
    float* const to = outputs.logits().Row(position);
    if (to == nullptr) continue;
    const float* const row = part.sampled + (position - part.sampled_begin) * vocab_size;
    std::copy_n(logits.Read(row, 1), vocab_size, to);
  }
}

void StepOutputs::WriteRow(const Row& row, const float* logits, int64_t vocab_size, size_t index) {
  const Request& request = *row.request;
  if (float* const to = request.LogitsRow(row.position)) std::copy_n(logits, vocab_size, to);
  if (!request.spec.IsScored(row.position)) return;
  scores_[index].top.resize(static_cast<size_t>(request.spec.logprobs.num_top));
  const int32_t next = request.tokens[static_cast<size_t>(row.position + 1)];
  ComputeLogprobs(kernels_, logits, vocab_size, next, scores_[index]);
}

void StepOutputs::Write(Decoder& decoder, ThreadPool& pool, LogitsBuffer& logits,
                        int64_t first_row) {
  for (const Part& part : parts_) WriteStates(part, decoder, logits);
  const int64_t slice = logits.num_rows() - first_row;
  AS_CHECK(slice >= 1) << "no row of logits is left for what requests want of this step";
  const int64_t vocab_size = decoder.vocab_size();
  for (size_t begin = 0; begin < rows_.size(); begin += static_cast<size_t>(slice)) {
    const auto count = std::min(slice, static_cast<int64_t>(rows_.size() - begin));
    decoder.Logits(row_tokens_.data() + begin, count, logits.row(first_row));
    const float* const computed = logits.Read(logits.row(first_row), count);
    pool.ParallelFor(count, 1, [&](int64_t first, int64_t last, int) {
      for (int64_t i = first; i < last; ++i) {
        WriteRow(rows_[begin + static_cast<size_t>(i)], computed + i * vocab_size, vocab_size,
                 static_cast<size_t>(i));
      }
    });
    for (int64_t i = 0; i < count; ++i) {
      const Row& row = rows_[begin + static_cast<size_t>(i)];
      if (!row.request->spec.IsScored(row.position)) continue;
      row.request->queue->SetPromptLogprobs(row.position, scores_[static_cast<size_t>(i)]);
    }
  }
}

}  // namespace allspark
