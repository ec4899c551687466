#include "model/latent_attention.h"

#include "model/residual.h"
#include "ops/convert.h"
#include "ops/norm.h"
#include "ops/scale.h"

namespace allspark {
namespace {

// Views each head of dense rows as a row.
Matrix Heads(const Matrix& x, int64_t heads) {
  return {x.data, x.dtype, x.rows * heads, x.cols / heads, x.cols / heads};
}

// The columns that heads have in a matrix.
struct HeadColumns {
  Matrix first;    // of head 0
  int64_t stride;  // columns from one head to the next
};

// Multiplies each head's columns of x with its own weight.
void LinearHeads(const OpContext& context, const HeadColumns& x, const LinearWeight& weight,
                 int64_t heads, const HeadColumns& y, std::vector<LinearTask>& tasks) {
  const auto of = [](const HeadColumns& columns, int64_t head) {
    Matrix own = columns.first;
    own.data =
        static_cast<unsigned char*>(own.data) + head * columns.stride * ElementBytes(own.dtype);
    return own;
  };
  tasks.clear();
  for (int64_t h = 0; h < heads; ++h) {
    tasks.push_back({of(x, h), WeightOf(weight, heads, h), of(y, h), {}, {}});
  }
  LinearEach(context, tasks);
}

// Makes the queries that attention multiplies with the cached rows, in w.qkv.
void ProjectQueries(const OpContext& context, const DecoderShape& shape,
                    const LatentWeights& weights, const StepInput& step, const Workspace& w) {
  const int64_t heads = shape.q_heads, unrotated = shape.unrotated_dim();
  const Matrix& queries = w.latent.queries;
  Rope(context, Columns(queries, unrotated, queries.cols - unrotated), heads, shape.query_dim,
       step.positions, step.rope);
  const Matrix from = Heads(queries, heads), to = Heads(w.qkv, heads);
  Scale(context, Columns(from, unrotated, shape.rotary_dim), {}, /*accumulate=*/false,
        Columns(to, shape.kv_latent, shape.rotary_dim));
  HeadColumns x{Columns(queries, 0, unrotated), shape.query_dim};
  if (shape.compute != DType::kFloat32) {
    const Matrix& rounded = w.latent.rounded_queries;
    Convert(context, Columns(from, 0, unrotated), Heads(rounded, heads));
    x = {Columns(rounded, 0, unrotated), unrotated};
  }
  LinearHeads(context, x, weights.k_up, heads, {Columns(w.qkv, 0, shape.kv_latent), shape.head_dim},
              *step.tasks);
}

}  // namespace

QueryKeyValue ProjectLatents(const OpContext& context, const DecoderShape& shape,
                             const AttentionWeights& weights, const StepInput& step,
                             const Workspace& w) {
  const LatentWeights& own = weights.latent;
  const Matrix& latents = w.latent.latents;
  const auto lora = [&](const ConstMatrix& x, LoraWeight LoraLayer::*weight) {
    return step.lora->Layer(context, x, step.layer, weight, w.lora);
  };
  ConstMatrix read = ReadResidual(context, weights.norm, own.latents.input, w);
  ConstMatrix x = InOrder(context, read, own.latents, w);
  Linear(context, x, own.latents, /*accumulate=*/false, latents, lora(x, &LoraLayer::latents));
  const Matrix key = Columns(latents, shape.q_latent, shape.head_dim);
  const Matrix kv_latent = Columns(key, 0, shape.kv_latent);
  Norm(context, kv_latent, own.kv_norm, kv_latent);
  Rope(context, Columns(key, shape.kv_latent, shape.rotary_dim), 1, shape.rotary_dim,
       step.positions, step.rope);
  if (shape.q_latent > 0) {
    const Matrix normed = w.latent.q_latent.As(own.q.input);
    Norm(context, Columns(latents, 0, shape.q_latent), own.q_norm, normed);
    read = normed;
  } else if (own.q.input != own.latents.input) {
    read = ReadResidual(context, weights.norm, own.q.input, w);
  }
  x = InOrder(context, read, own.q, w);
  Linear(context, x, own.q, /*accumulate=*/false, w.latent.queries, lora(x, &LoraLayer::q));
  ProjectQueries(context, shape, own, step, w);
  return {w.qkv, key, key};
}

Matrix ValuesOfLatents(const OpContext& context, const DecoderShape& shape,
                       const AttentionWeights& weights, const Matrix& attended,
                       std::vector<LinearTask>& tasks, const Workspace& w) {
  LinearHeads(context, {Columns(attended, 0, shape.kv_latent), shape.head_dim}, weights.latent.v_up,
              shape.q_heads, {Columns(w.latent.values, 0, shape.value_dim), shape.value_dim},
              tasks);
  return w.latent.values;
}

}  // namespace allspark
