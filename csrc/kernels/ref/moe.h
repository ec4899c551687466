// The reference kernels of mixtures of experts; part of FillReference.
#pragma once

#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillMoeReference(KernelTable& table) noexcept;

}  // namespace allspark::kernels
