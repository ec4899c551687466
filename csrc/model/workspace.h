// Workspace: where each intermediate matrix of one Forward lies in the step arena. One allocation
// per step; the buffers of a layer's two halves, which never live at once, share their bytes.
#pragma once

#include <cstdint>

#include "memory/step_arena.h"
#include "model/decoder_shape.h"
#include "ops/op_context.h"

namespace allspark {

struct Workspace {
  Matrix residual;  // [tokens, hidden] float32: the stream that attention and MLP add to
  Matrix normed;    // [tokens, hidden] compute dtype: what GEMMs read; last, the rows that sample
  // Attention half.
  Matrix qkv;       // [tokens, qkv_cols] float32
  Matrix attended;  // [tokens, q_cols] compute dtype
  float* scratch = nullptr;
  // MLP half.
  Matrix gate_up;  // [tokens, 2 * intermediate] float32
  Matrix gated;    // [tokens, intermediate] compute dtype
};

// Arena bytes a step of `tokens` tokens takes. Grows with tokens.
int64_t WorkspaceBytes(const DecoderShape& shape, int64_t tokens, int64_t num_threads);
// Takes WorkspaceBytes(...) from the arena.
Workspace AllocateWorkspace(const DecoderShape& shape, int64_t tokens, int64_t num_threads,
                            StepArena& arena);

}  // namespace allspark
