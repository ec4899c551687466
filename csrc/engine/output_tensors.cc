#include "engine/output_tensors.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>

#include "platform/system_limits.h"

namespace allspark {
namespace {

PositionRows Plan(OutputRows which, const OutputTensors::Sizes& sizes, int64_t cols) {
  if (which == OutputRows::kNone) return {};
  return {.begin = which == OutputRows::kAll ? 0 : sizes.prompt_length - 1,
          .end = sizes.num_positions,
          .cols = cols};
}

int64_t NumFloats(const PositionRows& rows) { return (rows.end - rows.begin) * rows.cols; }

void AddView(const PositionRows& rows, int64_t begin, int64_t end, const char* name,
             std::map<std::string, OutputTensor>& views) {
  if (rows.memory == nullptr) return;
  begin = std::max(begin, rows.begin);
  if (begin >= end) return;
  views[name] = {.data = std::shared_ptr<float>(rows.memory, rows.Row(begin)),
                 .shape = {end - begin, rows.cols}};
}

}  // namespace

Result<std::shared_ptr<OutputTensors>> OutputTensors::Create(const GenerationConfig& config,
                                                             const Sizes& sizes) {
  auto outputs = std::make_shared<OutputTensors>();
  const OutputRows hidden = config.output_last_hidden_state;
  const bool both = config.enable_tensors_from_model_inference;
  outputs->hidden_states_ = Plan(both ? OutputRows::kAll : hidden, sizes, sizes.hidden_size);
  outputs->inputs_embedding_ =
      Plan(both ? OutputRows::kAll : OutputRows::kNone, sizes, sizes.hidden_size);
  outputs->logits_ = Plan(config.output_logits, sizes, sizes.vocab_size);
  PositionRows* const all[] = {&outputs->hidden_states_, &outputs->inputs_embedding_,
                               &outputs->logits_};
  int64_t num_floats = 0;
  for (const PositionRows* rows : all) num_floats += NumFloats(*rows);
  if (num_floats == 0 && config.pooling == Pooling::kNone) return std::shared_ptr<OutputTensors>();
  const int64_t bytes = num_floats * static_cast<int64_t>(sizeof(float));
  const auto refuse = [&] {
    const MemoryBound available = AvailableMemory();
    std::string fields = both ? "enable_tensors_from_model_inference" : "";
    for (const auto& [name, rows] : {std::pair{"output_last_hidden_state", hidden},
                                     std::pair{"output_logits", config.output_logits}}) {
      if (rows != OutputRows::kNone) fields += (fields.empty() ? "" : " and ") + std::string(name);
    }
    return Status::ResourceExhausted(
        "the tensors of " + fields + " take " + std::to_string(bytes >> 20) + " MiB for up to " +
        std::to_string(sizes.num_positions) + " tokens; " + std::to_string(available.bytes >> 20) +
        " MiB are available (max_new_tokens sets the length): " + available.source);
  };
  if (bytes > 0 && bytes > AvailableMemory().bytes) return refuse();
  try {
    for (PositionRows* rows : all) {
      if (NumFloats(*rows) == 0) continue;
      rows->memory = std::make_shared_for_overwrite<float[]>(static_cast<size_t>(NumFloats(*rows)));
    }
  } catch (const std::bad_alloc&) {
    return refuse();
  }
  outputs->bytes_ = bytes;
  outputs->prompt_length_ = sizes.prompt_length;
  outputs->hidden_size_ = sizes.hidden_size;
  if (config.pooling != Pooling::kNone) {
    const auto size = static_cast<size_t>(sizes.hidden_size);
    outputs->embedding_ = std::make_shared<float[]>(size);
    outputs->normalize_ = config.normalize;
    if (config.pooling == Pooling::kMean) outputs->sum_.resize(size);
  }
  return outputs;
}

float* OutputTensors::PooledRow(int64_t position) const {
  if (embedding_ == nullptr || position >= prompt_length_) return nullptr;
  return !sum_.empty() || position == prompt_length_ - 1 ? embedding_.get() : nullptr;
}

void OutputTensors::Pool(int64_t position) {
  float* const embedding = embedding_.get();
  const bool last = position == prompt_length_ - 1;
  for (size_t i = 0; i < sum_.size(); ++i) {
    sum_[i] += double{embedding[i]};
    if (last) embedding[i] = static_cast<float>(sum_[i] / static_cast<double>(prompt_length_));
  }
  if (!last || !normalize_) return;
  double squares = 0;
  for (int64_t i = 0; i < hidden_size_; ++i) squares += double{embedding[i]} * double{embedding[i]};
  const double length = std::sqrt(squares);
  if (length == 0) return;
  for (int64_t i = 0; i < hidden_size_; ++i) {
    embedding[i] = static_cast<float>(double{embedding[i]} / length);
  }
}

bool OutputTensors::WantsWholePrompt() const {
  const PositionRows* const all[] = {&hidden_states_, &inputs_embedding_, &logits_};
  return !sum_.empty() || std::any_of(std::begin(all), std::end(all), [&](const auto* rows) {
    return rows->memory != nullptr && rows->begin == 0;
  });
}

std::map<std::string, OutputTensor> OutputTensors::Views(int64_t begin, int64_t end) const {
  std::map<std::string, OutputTensor> views;
  AddView(hidden_states_, begin, end, "hidden_states", views);
  AddView(inputs_embedding_, begin, end, "inputs_embedding", views);
  AddView(logits_, begin, end, "logits", views);
  if (embedding_ != nullptr && begin == 0) {
    views["embedding"] = {.data = std::shared_ptr<float>(embedding_, embedding_.get()),
                          .shape = {hidden_size_}};
  }
  return views;
}

}  // namespace allspark
