// What attention and MLP have in common: how they read the residual stream and add to it.
#pragma once

#include <span>

#include "model/decoder_weights.h"
#include "model/workspace.h"

namespace allspark {

// The residual stream as input of a GEMM with activations of `format`: normalised, or as it is if
// the spec has no norm there.
ConstMatrix ReadResidual(const OpContext& context, const NormWeight& norm,
                         const InputFormat& format, const Workspace& w);
// The same into `room`, for later.
ConstMatrix ReadResidualInto(const OpContext& context, const NormWeight& norm,
                             const InputFormat& format, const ActivationBuffer& room,
                             const Workspace& w);

// x (float32 or bfloat16) as input of a GEMM with activations of `format`: x itself if it has that
// format, otherwise rounded into `room`.
ConstMatrix Rounded(const OpContext& context, const ConstMatrix& x, const InputFormat& format,
                    const ActivationBuffer& room);

// x with its columns in the order of `weight`: x itself, or a reordered copy if the weight has
// another order. Valid until the next call.
ConstMatrix InOrder(const OpContext& context, const ConstMatrix& x, const LinearWeight& weight,
                    const Workspace& w);

// Adds x * weight^T to the residual stream; where the spec says so, normalised and scaled first.
void AddToResidual(const OpContext& context, const ConstMatrix& x, const LinearWeight& weight,
                   const NormWeight& post_norm, const Scaling& scaling,
                   std::span<const kernels::LowRank> low_rank, const Workspace& w);

// Where what does not end in a product writes its result (float32). If `accumulates`, the
// result is added to the stream; otherwise y is a matrix that FinishResidual adds later.
struct ResidualOut {
  Matrix y;
  bool accumulates;
};
ResidualOut ResidualOutput(const Workspace& w);
void FinishResidual(const OpContext& context, const NormWeight& post_norm, const Scaling& scaling,
                    const Workspace& w);

}  // namespace allspark
