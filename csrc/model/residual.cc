#include "model/residual.h"

#include "ops/convert.h"
#include "ops/gather_columns.h"
#include "ops/norm.h"
#include "ops/quantize.h"
#include "ops/scale.h"

namespace allspark {

ConstMatrix ReadResidual(const OpContext& context, const NormWeight& norm,
                         const InputFormat& format, const Workspace& w) {
  return ReadResidualInto(context, norm, format, w.normed, w);
}

ConstMatrix ReadResidualInto(const OpContext& context, const NormWeight& norm,
                             const InputFormat& format, const ActivationBuffer& room,
                             const Workspace& w) {
  if (norm.weight == nullptr) return Rounded(context, w.residual, format, room);
  const Matrix out = room.As(format);
  Norm(context, w.residual, norm, out);
  return out;
}

ConstMatrix Rounded(const OpContext& context, const ConstMatrix& x, const InputFormat& format,
                    const ActivationBuffer& room) {
  if (x.format() == format) return x;
  const Matrix out = room.As(format);
  if (format.dtype == DType::kInt8) {
    Quantize(context, x, out);
  } else {
    Convert(context, x, out);
  }
  return out;
}

ConstMatrix InOrder(const OpContext& context, const ConstMatrix& x, const LinearWeight& weight,
                    const Workspace& w) {
  if (weight.order == nullptr) return x;
  Matrix out = w.reordered.As(x.format());
  out.rows = x.rows;
  out.cols = x.cols;
  GatherColumns(context, x, weight.order, out);
  return out;
}

void AddToResidual(const OpContext& context, const ConstMatrix& x, const LinearWeight& weight,
                   const NormWeight& post_norm, const Scaling& scaling,
                   std::span<const kernels::LowRank> low_rank, const Workspace& w) {
  const ResidualOut out = ResidualOutput(w);
  Linear(context, x, weight, out.accumulates, out.y, low_rank);
  FinishResidual(context, post_norm, scaling, w);
}

ResidualOut ResidualOutput(const Workspace& w) {
  return w.addend.data == nullptr ? ResidualOut{w.residual, true} : ResidualOut{w.addend, false};
}

void FinishResidual(const OpContext& context, const NormWeight& post_norm, const Scaling& scaling,
                    const Workspace& w) {
  if (w.addend.data == nullptr) return;
  if (post_norm.weight != nullptr) Norm(context, w.addend, post_norm, w.addend);
  Scale(context, w.addend, scaling, /*accumulate=*/true, w.residual);
}

}  // namespace allspark
