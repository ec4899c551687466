#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillAvx512Bf16(KernelTable&) noexcept {}

}  // namespace allspark::kernels
