#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillAvx2(KernelTable&) noexcept {}

}  // namespace allspark::kernels
