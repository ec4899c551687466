// The tensors that a request gets besides tokens: a row of hidden states, input embeddings or
// logits per position, and an embedding pooled from its prompt. Create allocates all memory, on the
// caller's thread. The step thread writes each row once; readers get views of rows that are
// complete, which keep the memory alive.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "allspark/config.h"
#include "allspark/result_queue.h"
#include "allspark/status.h"

namespace allspark {

// Rows of positions [begin, end), uninitialised: pages are first touched when their rows are
// written.
struct PositionRows {
  std::shared_ptr<float[]> memory = nullptr;
  int64_t begin = 0, end = 0;
  int64_t cols = 0;

  // Null where the position has no row.
  float* Row(int64_t position) const {
    return position >= begin && position < end ? memory.get() + (position - begin) * cols : nullptr;
  }
};

class OutputTensors {
 public:
  struct Sizes {
    int64_t prompt_length = 0;
    int64_t num_positions = 0;  // most positions that have outputs
    int64_t hidden_size = 0;
    int64_t vocab_size = 0;
  };
  // Null where the config asks for nothing. ResourceExhausted if the machine has too little memory;
  // the message names the fields.
  static Result<std::shared_ptr<OutputTensors>> Create(const GenerationConfig& config,
                                                       const Sizes& sizes);

  int64_t bytes() const { return bytes_; }

  // For the step thread.
  const PositionRows& hidden_states() const { return hidden_states_; }
  const PositionRows& inputs_embedding() const { return inputs_embedding_; }
  const PositionRows& logits() const { return logits_; }
  // Where the hidden state of a position has to be written before Pool(position); null: not wanted.
  float* PooledRow(int64_t position) const;
  // Includes a position's hidden state in the embedding. Positions come in order, so the mean has
  // the same bits for any chunking.
  void Pool(int64_t position);
  // Whether an output of every prompt token is wanted. Then none may come from the prefix cache.
  bool WantsWholePrompt() const;

  // For readers: views of the rows of positions [begin, end), all of them complete; the embedding
  // where `begin` is 0.
  std::map<std::string, OutputTensor> Views(int64_t begin, int64_t end) const;

 private:
  PositionRows hidden_states_, inputs_embedding_, logits_;
  std::shared_ptr<float[]> embedding_;
  std::vector<double> sum_;  // of the hidden states so far, for the mean
  bool normalize_ = false;
  int64_t prompt_length_ = 0;
  int64_t hidden_size_ = 0;
  int64_t bytes_ = 0;  // of all rows
};

}  // namespace allspark
