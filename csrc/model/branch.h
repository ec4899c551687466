// What attention and MLP have in common: how they read the residual stream and add to it.
#pragma once

#include <span>

#include "model/decoder_weights.h"
#include "model/workspace.h"

namespace allspark {

// The stream as a GEMM with activations of `dtype` reads it: normalised, or where the spec has no
// norm there, as it is.
ConstMatrix ReadResidual(const OpContext& context, const NormWeight& norm, DType dtype,
                         const Workspace& w);
// The same into `room`, for later.
ConstMatrix ReadResidualInto(const OpContext& context, const NormWeight& norm, DType dtype,
                             const ActivationBuffer& room, const Workspace& w);

// x, float32 or bfloat16, as a GEMM with activations of `dtype` reads it: itself where it has that
// dtype, else rounded into `room`.
ConstMatrix Rounded(const OpContext& context, const ConstMatrix& x, DType dtype,
                    const ActivationBuffer& room);

// x as `weight` reads it: itself, or where the weight's columns have another order, in that order.
// Until the next call.
ConstMatrix InOrder(const OpContext& context, const ConstMatrix& x, const LinearWeight& weight,
                    const Workspace& w);

// Adds x * weight^T to the stream, normalised and scaled before where the spec says so.
void AddToResidual(const OpContext& context, const ConstMatrix& x, const LinearWeight& weight,
                   const NormWeight& post_norm, const Scaling& scaling,
                   std::span<const kernels::LowRank> low_rank, const Workspace& w);

// Where a branch that does not end in a product puts its result, float32: added to the stream where
// `accumulates`, else a matrix that AddBranch then adds.
struct BranchOut {
  Matrix y;
  bool accumulates;
};
BranchOut BranchOutput(const Workspace& w);
void AddBranch(const OpContext& context, const NormWeight& post_norm, const Scaling& scaling,
               const Workspace& w);

}  // namespace allspark
