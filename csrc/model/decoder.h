// Decoder: executes a DecoderSpec over a batch. One class for every architecture. It owns views of
// the weights and tables derived from them (rope), not the weights. One Forward at a time; after
// construction Forward allocates nothing but arena scratch.
#pragma once

#include <cstdint>
#include <memory>

#include "allspark/config.h"
#include "allspark/status.h"
#include "base/dtype.h"
#include "kernels/kernel_table.h"
#include "memory/allocator.h"
#include "memory/step_arena.h"
#include "model/batch.h"
#include "model/kv_pool.h"
#include "platform/thread_pool.h"

namespace allspark {

class ModelReader;  // weights/model_reader.h

struct DecoderOptions {
  int64_t max_length = 0;       // positions the rope table must cover
  int64_t max_tokens = 0;       // most tokens in one batch
  int64_t max_logits_rows = 0;  // most logits rows in one batch
  int64_t block_size = 32;      // KV tokens per block
  CacheMode cache_mode = CacheMode::kDefault;
  int64_t lora_max_rank = 0;  // highest rank of a batch's adapters; 0: there are none
  // For max_length beyond the model's max_position (RuntimeConfig says what they do).
  double rope_scaling_factor = 0;  // 0: rope as the model has it
  bool use_logn_attn = false;
};

// What a decoder takes of the device's memory.
struct DecoderBytes {
  int64_t block = 0;   // of one KV block, all layers, K and V
  int64_t arena = 0;   // of the arena, for the largest batch (logits not included)
  int64_t tables = 0;  // of what it computes at its creation and keeps
};

class Decoder {
 public:
  // `weights`, `kernels`, `pool` and `allocator` outlive the decoder. Unimplemented when the table
  // lacks a kernel the spec needs (names op and dtype); DataLoss when a tensor is missing or
  // misshapen.
  static Result<std::unique_ptr<Decoder>> Create(const ModelReader& weights,
                                                 const DecoderOptions& options,
                                                 const kernels::KernelTable& kernels,
                                                 ThreadPool* pool, Allocator* allocator);
  // What Create and the steps will take, before there is a decoder. Errors as MakeDecoderShape's.
  static Result<DecoderBytes> Measure(const ModelReader& weights, const DecoderOptions& options,
                                      int64_t num_threads);
  virtual ~Decoder() = default;

  virtual int64_t vocab_size() const = 0;
  virtual int64_t hidden_size() const = 0;
  virtual int64_t block_bytes() const = 0;
  virtual int64_t arena_bytes() const = 0;
  // Where a block of the pool lies.
  virtual KvBlock BlockAt(const KvPool& kv, int32_t block) const = 0;
  // Writes the KV of every token and logits[row, :] (float32, row stride vocab_size) for the
  // sequences that want it.
  virtual void Forward(const Batch& batch, const KvPool& kv, StepArena& arena, float* logits) = 0;

  // More of the tokens of the last Forward, by their place in its batch; until the arena is reset.
  // logits: [num_tokens, vocab_size], of tokens[i] in row i. No more rows than the batch has
  // tokens.
  virtual void Logits(const int64_t* tokens, int64_t num_tokens, float* logits) = 0;
  // Of [token_begin, +num_tokens): what the last norm gives, and what the first layer reads of the
  // embedding. [num_tokens, hidden_size], float32 also where lm_head reads rounded rows.
  virtual void HiddenStates(int64_t token_begin, int64_t num_tokens, float* hidden) = 0;
  virtual void InputEmbeddings(int64_t token_begin, int64_t num_tokens, float* embeddings) = 0;
};

}  // namespace allspark
