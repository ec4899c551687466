// LoraAdapter: what one adapter adds to a decoder's weights, packed for the kernels in memory of
// its own. Immutable; any thread may read. LoraBatch: which rows of a step have which adapter.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "allspark/status.h"
#include "memory/allocator.h"
#include "model/batch.h"
#include "model/decoder_shape.h"
#include "ops/device.h"
#include "ops/lora.h"
#include "weights/lora_file.h"
#include "weights/model_reader.h"

namespace allspark {

// The weights of a layer that an adapter may add to.
struct LoraLayer {
  LoraWeight qkv;
  LoraWeight latents;  // latent attention: latents and q instead of qkv
  LoraWeight q;
  LoraWeight o;
  LoraWeight gate_up;  // or up alone
  LoraWeight down;
};

class LoraAdapter {
 public:
  // InvalidArgument, naming the tensor, the value and the bound, if the adapter does not fit the
  // model, whose shape is `shape`; LORA_RANK_EXCEED_LIMIT_ERROR above `max_rank`; Unimplemented
  // when the device lacks an operation. The device's memory outlives it.
  static Result<std::shared_ptr<const LoraAdapter>> Create(const LoraFile& file,
                                                           const ModelReader& model,
                                                           const DecoderShape& shape,
                                                           int64_t max_rank, Device& device);

  const LoraLayer& layer(int64_t i) const { return layers_[static_cast<size_t>(i)]; }
  const LoraWeight& embedding() const { return embedding_; }
  const LoraWeight& lm_head() const { return lm_head_; }
  int64_t bytes() const { return static_cast<int64_t>(buffer_.bytes()); }
  // The highest rank of a module.
  int64_t rank() const { return rank_; }

 private:
  friend class LoraBuilder;

  Buffer buffer_;
  std::vector<LoraLayer> layers_;
  LoraWeight embedding_;
  LoraWeight lm_head_;
  int64_t rank_ = 0;
};

// Most elements of a * x for one weight, if its modules have ranks up to `max_rank`.
int64_t MaxLoraColumns(int64_t max_rank);

class LoraBatch {
 public:
  // For batches of `max_tokens` tokens. A step allocates nothing.
  explicit LoraBatch(int64_t max_tokens);

  void Take(const Batch& batch);
  // What adapters add to a Linear of a layer over x; until the next call.
  std::span<const kernels::LowRank> Layer(const OpContext& context, const ConstMatrix& x,
                                          int64_t layer, LoraWeight LoraLayer::*weight,
                                          const LoraScratch& scratch);
  // The same for lm_head; row i of x is that of token tokens[i].
  std::span<const kernels::LowRank> LmHead(const OpContext& context, const ConstMatrix& x,
                                           const int64_t* tokens, const LoraScratch& scratch);
  // Adds to `out`, the embeddings of the tokens from token_begin on; `ids`: their ids.
  void AddEmbedding(const OpContext& context, const int32_t* ids, int64_t token_begin,
                    const LoraScratch& scratch, const Matrix& out);

 private:
  struct Range {
    int64_t token_begin, num_tokens;
    const LoraAdapter* adapter;
  };

  // Rows [row_begin, + num_rows) follow those added before.
  void Add(int64_t row_begin, int64_t num_rows, const LoraWeight& weight);

  std::vector<Range> ranges_;  // ascending, with an adapter each
  std::vector<LoraRows> rows_;
  std::vector<kernels::LowRank> low_rank_;
};

}  // namespace allspark
