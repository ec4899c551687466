// Workspace: where each intermediate matrix of one Forward lies in the step arena. One allocation
// per step; the buffers of a layer's two halves, which never live at once, share their bytes.
#pragma once

#include <cstdint>

#include "memory/step_arena.h"
#include "model/decoder_shape.h"
#include "ops/lora.h"
#include "ops/op_context.h"

namespace allspark {

// What a GEMM reads: room for [rows, cols] in any of the dtypes that it may have, and for what
// int8 rows have besides.
struct ActivationBuffer {
  Matrix room;  // in the widest dtype

  Matrix As(DType dtype) const {
    return {room.data, dtype, room.rows, room.cols, room.ld, room.row_scale, room.row_sums};
  }
};

struct Workspace {
  Matrix residual;          // [tokens, hidden] float32: the stream that attention and MLP add to
  ActivationBuffer normed;  // [tokens, hidden]; last, the rows that sample
  ActivationBuffer mlp_normed;   // of parallel_residual, what the MLP reads; may be `normed`
  Matrix branch;                 // [tokens, hidden] float32; empty unless shape.has_branch()
  float* row_scratch = nullptr;  // [threads][row_scratch_floats]: a row before it is quantised
  int64_t row_scratch_floats = 0;
  LoraScratch lora;  // empty without adapters
  // Attention half.
  Matrix qkv;                      // [tokens, qkv_cols] float32
  ActivationBuffer attended;       // [tokens, q_cols]
  ActivationBuffer attended_int8;  // the same, quantised
  float* scratch = nullptr;
  // MLP half.
  Matrix gate_up;          // [tokens, up_cols] float32: what LinearGated may need
  ActivationBuffer gated;  // [tokens, intermediate]
};

// What decides how large a workspace is.
struct WorkspaceSize {
  int64_t tokens = 0;
  int64_t num_threads = 1;
  int64_t lora_columns = 0;  // most elements of an adapter's a * x; 0: no adapters
};

// Arena bytes a step takes. Grows with its tokens.
int64_t WorkspaceBytes(const DecoderShape& shape, const WorkspaceSize& size);
// Takes WorkspaceBytes(...) from the arena.
Workspace AllocateWorkspace(const DecoderShape& shape, const WorkspaceSize& size, StepArena& arena);

}  // namespace allspark
