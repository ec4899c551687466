// Workspace: where each intermediate matrix of one Forward lies in the step arena. One allocation
// per step; the buffers of a layer's two halves, which never live at once, share their bytes.
#pragma once

#include <cstdint>

#include "memory/step_arena.h"
#include "model/decoder_shape.h"
#include "ops/lora.h"
#include "ops/moe.h"
#include "ops/op_context.h"
#include "tensor/tensor_view.h"

namespace allspark {

// Columns [begin, begin + cols) of every row.
inline Matrix Columns(Matrix x, int64_t begin, int64_t cols) {
  x.data = static_cast<unsigned char*>(x.data) + begin * ElementBytes(x.dtype);
  x.cols = cols;
  return x;
}

// The intermediate matrices of a mixture of experts. Pairs are in the order of Routing; the shared
// expert has a row for every token.
struct MoeWorkspace {
  Matrix logits;  // [tokens, router.logits()] float32
  Routing routing;
  ActivationBuffer gathered;      // [pairs, hidden]
  ActivationBuffer gated;         // [pairs, expert_intermediate]
  ActivationBuffer shared_gated;  // [tokens, shared_intermediate]
  Matrix outputs;                 // [pairs (+ tokens), hidden] float32
  // Scratch of LinearGatedExperts, and its result if that is quantised afterwards. They share their
  // bytes with `outputs`, and are lost when it is written.
  Matrix gate_up;             // [pairs, 2 * expert_intermediate] float32
  Matrix gated_float;         // [pairs, expert_intermediate] float32
  Matrix shared_gate_up;      // [tokens, 2 * shared_intermediate] float32
  Matrix shared_gated_float;  // [tokens, shared_intermediate] float32
};

// The intermediate matrices of latent attention.
struct LatentWorkspace {
  Matrix latents;             // [tokens, latent_cols] float32
  ActivationBuffer q_latent;  // [tokens, q_latent], normalised
  Matrix queries;             // [tokens, q_heads * query_dim] float32
  Matrix rounded_queries;     // [tokens, q_heads * unrotated_dim] in the compute type; or none
  Matrix values;              // [tokens, o_cols] float32
  Matrix rotated_keys;        // [tokens, latent_cols] float32; empty unless shape.rotates_keys
};

struct Workspace {
  Matrix residual;          // [tokens, hidden] float32: the stream that attention and MLP add to
  ActivationBuffer normed;  // [tokens, hidden]; at the end the rows for lm_head
  ActivationBuffer mlp_normed;  // with parallel_residual, what the MLP reads; may be `normed`
  ActivationBuffer reordered;   // [tokens, reordered_cols]; empty where nothing is reordered
  Matrix addend;                // [tokens, hidden] float32; empty unless shape.has_addend()
  RowScratch row_scratch;       // rows before they are quantised
  LoraScratch lora;             // empty without adapters
  // Attention half.
  Matrix qkv;                 // [tokens, qkv_cols] float32; with latents, [tokens, q_cols]
  LatentWorkspace latent;     // empty without latents
  ActivationBuffer attended;  // [tokens, q_cols]
  ActivationBuffer o_input;   // [tokens, o_cols], where it is not `attended`
  float* attention_scratch = nullptr;
  // MLP half, of layers with experts and of others.
  MoeWorkspace moe;
  Matrix gate_up;          // [tokens, up_cols] float32: what LinearGated may need
  ActivationBuffer gated;  // [tokens, intermediate]
  // After the layers, in the place of their halves.
  Matrix output;  // [tokens, hidden] float32: rows on their way to the host
};

// What the size of a workspace depends on.
struct WorkspaceSize {
  int64_t tokens = 0;
  int64_t max_length = 0;    // of a sequence
  int64_t lora_columns = 0;  // most elements of an adapter's a * x; 0: no adapters
};

// Arena bytes a step takes on a device with these operations. Grows with its tokens.
int64_t WorkspaceBytes(const DecoderShape& shape, const WorkspaceSize& size, const DeviceOps& ops);
// Takes WorkspaceBytes(...) from the arena.
Workspace AllocateWorkspace(const DecoderShape& shape, const WorkspaceSize& size,
                            const DeviceOps& ops, StepArena& arena);

}  // namespace allspark
