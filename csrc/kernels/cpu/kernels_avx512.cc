#include "kernels/kernel_slots.h"

namespace allspark::kernels {

void FillAvx512(KernelTable&) noexcept {}

}  // namespace allspark::kernels
