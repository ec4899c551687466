// The reference kernels of the KV cache and of attention; part of FillReference.
#pragma once

#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillAttentionReference(KernelTable& table) noexcept;

}  // namespace allspark::kernels
