// Workspace: where each intermediate matrix of one Forward lies in the step arena. One allocation
// per step; the buffers of a layer's two halves, which never live at once, share their bytes.
#pragma once

#include <cstdint>

#include "memory/step_arena.h"
#include "model/decoder_shape.h"
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
  float* row_scratch = nullptr;  // [threads][row_scratch_floats]: a row before it is quantised
  int64_t row_scratch_floats = 0;
  // Attention half.
  Matrix qkv;                      // [tokens, qkv_cols] float32
  ActivationBuffer attended;       // [tokens, q_cols]
  ActivationBuffer attended_int8;  // the same, quantised
  float* scratch = nullptr;
  // MLP half.
  Matrix gate_up;          // [tokens, 2 * intermediate] float32: what LinearGated may need
  ActivationBuffer gated;  // [tokens, intermediate]
};

// Arena bytes a step of `tokens` tokens takes. Grows with tokens.
int64_t WorkspaceBytes(const DecoderShape& shape, int64_t tokens, int64_t num_threads);
// Takes WorkspaceBytes(...) from the arena.
Workspace AllocateWorkspace(const DecoderShape& shape, int64_t tokens, int64_t num_threads,
                            StepArena& arena);

}  // namespace allspark
