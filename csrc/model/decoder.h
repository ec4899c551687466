// Decoder: executes a DecoderSpec over a batch. One class for every architecture. It owns views of
// the weights and tables derived from them (rope), not the weights. One Forward at a time; after
// construction Forward allocates nothing but arena scratch.
#pragma once

#include <cstdint>
#include <memory>

#include "allspark/config.h"
#include "allspark/status.h"
#include "memory/step_arena.h"
#include "model/batch.h"
#include "ops/device.h"
#include "ops/kv_pool.h"

namespace allspark {

class ModelReader;  // weights/model_reader.h

// float32 holds every position up to here exactly, so angles are position * frequency as written.
inline constexpr int64_t kMaxPositions = int64_t{1} << 24;

struct DecoderOptions {
  int64_t max_length = 0;       // positions the rope table must cover
  int64_t max_tokens = 0;       // most tokens in one batch
  int64_t max_logits_rows = 0;  // most logits rows in one batch
  int64_t block_size = 32;      // KV tokens per block
  CacheMode cache_mode = CacheMode::kDefault;
  int64_t lora_max_rank = 0;  // highest rank of a batch's adapters; 0: there are none
  // For max_length beyond the model's max_position (RuntimeConfig says what they do).
  double rope_scaling_factor = 0;  // 0: rope as the model has it
  bool may_keep_rope = false;      // a rope that the factor cannot be applied to stays as it is
  bool use_logn_attn = false;
};

// The device memory that a decoder needs.
struct DecoderBytes {
  int64_t weights = 0;  // of their copies; 0 where the device's memory is the host's
  int64_t block = 0;    // of one KV block, all layers, K and V
  int64_t arena = 0;    // of the arena, for the largest batch (logits not included)
  int64_t tables = 0;   // of the tables that it computes at its creation
  int64_t image = 0;    // of a step's integers
};

class Decoder {
 public:
  // `weights` and `device` outlive the decoder. Unimplemented when the device lacks an operation
  // that the spec needs (names op and dtype); DataLoss when an order of columns is no permutation,
  // or a rope frequency not finite.
  static Result<std::unique_ptr<Decoder>> Create(const ModelReader& weights,
                                                 const DecoderOptions& options, Device& device);
  // What Create and the steps will need, without creating a decoder. Errors as of MakeDecoderShape
  // and CheckLearnedPositions.
  static Result<DecoderBytes> Measure(const ModelReader& weights, const DecoderOptions& options,
                                      const Device& device);
  virtual ~Decoder() = default;

  virtual int64_t vocab_size() const = 0;
  virtual int64_t hidden_size() const = 0;
  virtual const KvShape& kv_shape() const = 0;  // of the pools that Forward takes
  virtual int64_t arena_bytes() const = 0;
  // Writes the KV of every token and logits[row, :] (float32, row stride vocab_size, in the
  // device's memory) for the sequences that want it. What the batch points at stays until the next
  // Forward.
  virtual void Forward(const Batch& batch, const KvPool& kv, StepArena& arena, float* logits) = 0;
  // Runs the layers alone: from the residual stream `in` before the first to `out` after the last,
  // both [num_tokens, hidden_size]. `in` null: the stream begins with the embeddings of the batch's
  // tokens. `out` null: not wanted; it may be `in`. Both lie on the host. The batch wants no
  // logits.
  virtual void ForwardLayers(const Batch& batch, const KvPool& kv, StepArena& arena,
                             const float* in, float* out) = 0;

  // More outputs of the last Forward, for tokens given by their index in its batch; valid until the
  // arena is reset. logits: [num_tokens, vocab_size] in the device's memory, row i for tokens[i].
  // In all, num_tokens is at most the number of the batch's tokens.
  virtual void Logits(const int64_t* tokens, int64_t num_tokens, float* logits) = 0;
  // For tokens [token_begin, +num_tokens): the output of the last norm, and the input of the first
  // layer. [num_tokens, hidden_size] on the host, float32 even if lm_head reads rounded rows.
  virtual void HiddenStates(int64_t token_begin, int64_t num_tokens, float* hidden) = 0;
  virtual void InputEmbeddings(int64_t token_begin, int64_t num_tokens, float* embeddings) = 0;
};

}  // namespace allspark
