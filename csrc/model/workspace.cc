#include "model/workspace.h"

#include <algorithm>

#include "base/int_math.h"
#include "model/attention.h"
#include "ops/device_ops.h"

namespace allspark {
namespace {

// Lays matrices one after another from `base` on; with a null base it only counts.
class ArenaLayout {
 public:
  ArenaLayout(unsigned char* base, int64_t offset) : base_(base), offset_(offset) {}

  Matrix Take(DType dtype, int64_t rows, int64_t cols) {
    const int64_t begin = Advance(rows * cols * ElementBytes(dtype));
    return {base_ == nullptr ? nullptr : base_ + begin, dtype, rows, cols, cols};
  }
  // Scales and sums of int8 rows always have room: they are small.
  ActivationBuffer TakeActivations(DType widest, int64_t rows, int64_t cols) {
    Matrix room = Take(widest, rows, cols);
    const int64_t most_scales = CeilDiv(cols, kernels::kSumBlock);
    room.row_scale = static_cast<float*>(Take(DType::kFloat32, rows, most_scales).data);
    room.row_sums = static_cast<int32_t*>(Take(DType::kInt32, rows, kernels::RowSums(cols)).data);
    return {room};
  }
  int64_t offset() const { return offset_; }

 private:
  int64_t Advance(int64_t bytes) {
    constexpr int64_t kAlignment = 64;
    const int64_t begin = offset_;
    offset_ += AlignUp(bytes, kAlignment);
    return begin;
  }

  unsigned char* base_;
  int64_t offset_;
};

// Returns where it ends.
int64_t LayOutExperts(const DecoderShape& shape, int64_t tokens, ArenaLayout layout,
                      MoeWorkspace& w) {
  const RouterParams& router = shape.router;
  const int64_t pairs = tokens * router.top_k, hidden = shape.hidden;
  const int64_t inner = shape.expert_intermediate, shared = shape.shared_intermediate;
  const auto ints = [&](int64_t rows, int64_t cols) {
    return static_cast<int32_t*>(layout.Take(DType::kInt32, rows, cols).data);
  };
  w.logits = layout.Take(DType::kFloat32, tokens, router.logits());
  w.routing.experts = ints(tokens, router.top_k);
  w.routing.weights =
      static_cast<float*>(layout.Take(DType::kFloat32, tokens, router.columns()).data);
  w.routing.rows = ints(tokens, router.columns());
  w.routing.tokens = ints(1, pairs);
  w.routing.begins = ints(1, router.num_experts + 1);
  w.gathered = layout.TakeActivations(shape.compute, pairs, hidden);
  w.gated = layout.TakeActivations(shape.compute, pairs, inner);
  if (shared > 0) w.shared_gated = layout.TakeActivations(shape.compute, tokens, shared);
  ArenaLayout before = layout;
  w.gate_up = before.Take(DType::kFloat32, pairs, 2 * inner);
  if (shared > 0) w.shared_gate_up = before.Take(DType::kFloat32, tokens, 2 * shared);
  if (shape.int8_activations) {
    w.gated_float = before.Take(DType::kFloat32, pairs, inner);
    if (shared > 0) w.shared_gated_float = before.Take(DType::kFloat32, tokens, shared);
  }
  w.outputs = layout.Take(DType::kFloat32, tokens * router.columns(), hidden);
  return std::max(before.offset(), layout.offset());
}

// Beside the matrices that all attention has.
LatentWorkspace LayOutLatents(const DecoderShape& shape, int64_t tokens, ArenaLayout& layout) {
  const auto take = [&](int64_t cols) { return layout.Take(DType::kFloat32, tokens, cols); };
  LatentWorkspace w;
  w.latents = take(shape.latent_cols());
  if (shape.q_latent > 0)
    w.q_latent = layout.TakeActivations(shape.compute, tokens, shape.q_latent);
  w.queries = take(shape.q_heads * shape.query_dim);
  if (shape.compute != DType::kFloat32) {
    w.rounded_queries = layout.Take(shape.compute, tokens, shape.q_heads * shape.unrotated_dim());
  }
  w.values = take(shape.o_cols());
  // As wide as the latents, since keys and values are written with one stride.
  if (shape.rotates_keys) w.rotated_keys = take(shape.latent_cols());
  return w;
}

struct Layout {
  Workspace workspace;
  int64_t bytes;
};

Layout LayOut(const DecoderShape& shape, const WorkspaceSize& size, const DeviceOps& ops,
              unsigned char* base) {
  const auto [tokens, max_length, lora_columns] = size;
  Workspace w;
  ArenaLayout common(base, 0);
  w.residual = common.Take(DType::kFloat32, tokens, shape.hidden);
  w.normed = common.TakeActivations(shape.compute, tokens, shape.hidden);
  w.mlp_normed = w.normed;
  if (shape.parallel_residual && !shape.shares_normed()) {
    w.mlp_normed = common.TakeActivations(shape.compute, tokens, shape.hidden);
  }
  if (shape.reordered_cols > 0) {
    w.reordered = common.TakeActivations(shape.compute, tokens, shape.reordered_cols);
  }
  if (shape.has_addend()) w.addend = common.Take(DType::kFloat32, tokens, shape.hidden);
  w.row_scratch.floats = AlignUp(std::max({shape.hidden, shape.intermediate, shape.q_latent}), 16);
  w.row_scratch.data = static_cast<float*>(
      common.Take(DType::kFloat32, ops.num_scratch_rows(), w.row_scratch.floats).data);
  if (lora_columns > 0) {
    w.lora.sums = common.Take(DType::kFloat32, tokens, lora_columns);
    if (shape.compute != DType::kFloat32) {
      w.lora.low = common.TakeActivations(shape.compute, tokens, lora_columns);
    } else if (shape.int8_activations) {
      w.lora.low = common.TakeActivations(DType::kInt8, tokens, lora_columns);
    }
  }
  ArenaLayout attention(base, common.offset());
  const bool latents = shape.has_latents();
  w.qkv = attention.Take(DType::kFloat32, tokens, latents ? shape.q_cols() : shape.qkv_cols());
  if (latents) w.latent = LayOutLatents(shape, tokens, attention);
  const DType attended = latents ? shape.compute : DType::kFloat32;
  w.attended = attention.TakeActivations(attended, tokens, shape.q_cols());
  const DType o_input = latents ? shape.compute : DType::kInt8;
  w.o_input = attention.TakeActivations(o_input, tokens, shape.o_cols());
  const int64_t scratch_floats =
      ops.AttentionScratch(MakeAttentionParams(shape, /*window=*/0, max_length));
  w.attention_scratch =
      static_cast<float*>(attention.Take(DType::kFloat32, 1, scratch_floats).data);
  ArenaLayout mlp(base, common.offset());
  w.gate_up = mlp.Take(DType::kFloat32, tokens, shape.up_cols());
  w.gated = mlp.TakeActivations(shape.compute, tokens, shape.intermediate);
  ArenaLayout outputs(base, common.offset());
  w.output = outputs.Take(DType::kFloat32, tokens, shape.hidden);
  int64_t end = std::max({attention.offset(), mlp.offset(), outputs.offset()});
  if (shape.has_experts()) {
    end = std::max(end, LayOutExperts(shape, tokens, ArenaLayout(base, common.offset()), w.moe));
  }
  return {w, end};
}

}  // namespace

int64_t WorkspaceBytes(const DecoderShape& shape, const WorkspaceSize& size, const DeviceOps& ops) {
  return LayOut(shape, size, ops, nullptr).bytes;
}

Workspace AllocateWorkspace(const DecoderShape& shape, const WorkspaceSize& size,
                            const DeviceOps& ops, StepArena& arena) {
  const int64_t bytes = WorkspaceBytes(shape, size, ops);
  auto* base = static_cast<unsigned char*>(arena.Allocate(bytes));
  return LayOut(shape, size, ops, base).workspace;
}

}  // namespace allspark
