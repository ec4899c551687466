// One step's work as the decoder sees it: a ragged list of (sequence, token range, block table).
// Two sequences must not write a block that they share, unless nobody reads it. Plain pointers into
// memory that the step loop owns; a decode is a range of one token.
#pragma once

#include <cstdint>

namespace allspark {

class LoraAdapter;    // model/lora.h
class InputObserver;  // ops/input_observer.h
class OpProfile;      // ops/op_profile.h

struct BatchSequence {
  int64_t token_begin = 0;  // in Batch::tokens: where the sequence before it ends
  int64_t num_tokens = 0;
  int64_t position = 0;  // of its first token
  const int32_t* block_table = nullptr;
  // Rows of Batch's logits for its last num_logits tokens, from logits_row on; -1: none wanted.
  int32_t logits_row = -1;
  int32_t num_logits = 1;
  // Null: the base model. Contiguous sequences of one adapter read its weights once.
  const LoraAdapter* lora = nullptr;
};

struct Batch {
  const int32_t* tokens = nullptr;     // [num_tokens]
  const int32_t* positions = nullptr;  // [num_tokens]
  int64_t num_tokens = 0;
  const BatchSequence* sequences = nullptr;
  int64_t num_sequences = 0;
  int64_t num_logits_rows = 0;
  OpProfile* profile = nullptr;       // where the time of its operations is counted; null: nowhere
  InputObserver* observer = nullptr;  // sees the inputs of its products; null: nobody does
};

}  // namespace allspark
