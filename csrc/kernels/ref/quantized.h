// The reference kernels of quantised weights and activations; part of FillReference.
#pragma once

#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillQuantizedReference(KernelTable& table) noexcept;

}  // namespace allspark::kernels
