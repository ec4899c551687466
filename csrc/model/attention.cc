#include "model/attention.h"

#include "model/branch.h"
#include "ops/kv_write.h"
#include "ops/logn.h"
#include "ops/norm.h"
#include "ops/quantize.h"
#include "tensor/tensor_view.h"

namespace allspark {
namespace {

int64_t HeadBytes(const DecoderShape& shape, int64_t block_size) {
  return kernels::KvPartBytes(shape.cache, block_size, shape.head_dim);
}

ConstMatrix Columns(const Matrix& x, int64_t begin, int64_t cols) {
  return {static_cast<const float*>(x.data) + begin, x.dtype, x.rows, cols, x.ld};
}

}  // namespace

int64_t KvBlockBytes(const DecoderShape& shape, int64_t block_size) {
  return shape.num_layers * 2 * shape.kv_heads * HeadBytes(shape, block_size);
}

kernels::PagedKv MakePagedKv(const DecoderShape& shape, int64_t block_size, int64_t layer,
                             unsigned char* pool) {
  const int64_t head_stride = HeadBytes(shape, block_size);
  kernels::PagedKv kv{};
  kv.pool = pool;
  kv.block_stride = KvBlockBytes(shape, block_size);
  kv.k_offset = layer * 2 * shape.kv_heads * head_stride;
  kv.v_offset = kv.k_offset + shape.kv_heads * head_stride;
  kv.head_stride = head_stride;
  kv.block_size = block_size;
  return kv;
}

AttentionParams MakeAttentionParams(const DecoderShape& shape, int64_t window) {
  AttentionParams params;
  params.q_heads = shape.q_heads;
  params.kv_heads = shape.kv_heads;
  params.head_dim = shape.head_dim;
  params.scale = shape.attention_scale;
  params.window = window;
  params.soft_cap = shape.attention_soft_cap;
  return params;
}

void RunAttention(const OpContext& context, const DecoderShape& shape,
                  const AttentionWeights& weights, const kernels::PagedKv& kv,
                  const StepInput& step, const Workspace& w) {
  const ConstMatrix normed = ReadResidual(context, weights.norm, weights.qkv.activation, w);
  Linear(context, normed, weights.qkv, /*accumulate=*/false, w.qkv,
         step.lora->Layer(context, normed, step.layer, &LoraLayer::qkv, w.lora));
  if (shape.qk_norm_whole) {
    // As of one wide head: kv_cols divide q_cols, so the keys are a head of that size.
    NormHeads(context, w.qkv, 0, 1, shape.q_cols(), weights.q_norm);
    NormHeads(context, w.qkv, shape.q_heads / shape.kv_heads, 1, shape.kv_cols(), weights.k_norm);
  } else if (weights.q_norm.weight != nullptr) {
    NormHeads(context, w.qkv, 0, shape.q_heads, shape.head_dim, weights.q_norm);
    NormHeads(context, w.qkv, shape.q_heads, shape.kv_heads, shape.head_dim, weights.k_norm);
  }
  if (step.rope.rotary_dim > 0) {
    // Keys follow the queries in a row, so one call rotates both.
    Rope(context, w.qkv, shape.q_heads + shape.kv_heads, shape.head_dim, step.positions, step.rope);
  }
  if (step.logn_length > 0) {
    Matrix queries = w.qkv;
    queries.cols = shape.q_cols();
    LogN(context, step.positions, step.logn_length, queries);
  }
  const ConstMatrix q = Columns(w.qkv, 0, shape.q_cols());
  const ConstMatrix k = Columns(w.qkv, shape.q_cols(), shape.kv_cols());
  const ConstMatrix v = Columns(w.qkv, shape.q_cols() + shape.kv_cols(), shape.kv_cols());
  KvWrite(context, kv, shape.cache, step.sequences, step.num_sequences, k, v, shape.kv_heads,
          shape.head_dim);
  const bool quantize = weights.o.activation == DType::kInt8;
  Matrix attended = w.attended.As(quantize ? DType::kFloat32 : shape.compute);
  AttentionParams params = MakeAttentionParams(shape, weights.window);
  params.slopes = step.alibi_slopes;
  PagedAttention(context, params, kv, shape.cache, step.sequences, step.num_sequences, q, w.scratch,
                 attended);
  if (quantize) {
    const Matrix quantized = w.attended_int8.As(DType::kInt8);
    Quantize(context, attended, quantized);
    attended = quantized;
  }
  AddToResidual(context, attended, weights.o, weights.post_norm, shape.residual_scaling,
                step.lora->Layer(context, attended, step.layer, &LoraLayer::o, w.lora), w);
}

}  // namespace allspark
