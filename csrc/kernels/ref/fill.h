// The parts of FillReference that are in files of their own.
#pragma once

#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillAttentionReference(KernelTable& table) noexcept;  // and the KV cache
void FillMoeReference(KernelTable& table) noexcept;
void FillQuantizedReference(KernelTable& table) noexcept;  // weights and activations

}  // namespace allspark::kernels
