#include "ops/cpu/cpu_ops.h"

#include <cstring>

#include "ops/cpu/rows.h"

namespace allspark {

bool CpuOps::Has(OpKind kind, DType first, DType second) const {
  const int a = cpu::Slot(first), b = cpu::Slot(second);
  switch (kind) {
    case OpKind::kLinear:
      return kernels_.gemm[a][b] != nullptr;
    case OpKind::kFusedLinear:
      return kernels_.gemm_gated[a][b] != nullptr;
    case OpKind::kLowRank:
      return kernels_.low_rank[a] != nullptr;
    case OpKind::kRmsNorm:
      return kernels_.rms_norm[a] != nullptr;
    case OpKind::kLayerNorm:
      return kernels_.layer_norm[a] != nullptr;
    case OpKind::kGatedAct:
      return kernels_.gated_act[a] != nullptr;
    case OpKind::kGatherColumns:
      return kernels_.gather_columns[a] != nullptr;
    case OpKind::kEmbedding:
      return kernels_.embedding[a] != nullptr;
    case OpKind::kKvWrite:
      return kernels_.kv_write[a] != nullptr;
    case OpKind::kAttention:
      return kernels_.attention[a][b] != nullptr;
    case OpKind::kConvert:
      return kernels_.convert[a][b] != nullptr;
    case OpKind::kQuantize:
      return kernels_.quantize != nullptr;
    case OpKind::kScale:
      return kernels_.scale != nullptr;
    case OpKind::kRoute:
      return kernels_.route != nullptr;
    case OpKind::kCombine:
      return kernels_.combine != nullptr;
    case OpKind::kRope:
      return kernels_.rope != nullptr;
    case OpKind::kHadamard:
      return kernels_.hadamard != nullptr;
    case OpKind::kArgMax:
      return kernels_.argmax != nullptr;
  }
  return false;
}

void CpuOps::Upload(void* device, const void* host, size_t bytes) {
  std::memcpy(device, host, bytes);
}

void CpuOps::Download(void* host, const void* device, size_t bytes) {
  std::memcpy(host, device, bytes);
}

}  // namespace allspark
