// How the reference kernels read and write elements: in double, rounded once at the end.
#pragma once

#include "base/dtype.h"

namespace allspark::kernels {

AS_ALWAYS_INLINE double Load(const float* p) { return static_cast<double>(*p); }
AS_ALWAYS_INLINE double Load(const BFloat16* p) { return static_cast<double>(ToFloat(*p)); }
AS_ALWAYS_INLINE double Load(const int8_t* p) { return *p; }

// Through float32, as every kernel does: a double is first rounded to float, then to the stored
// type.
AS_ALWAYS_INLINE void Store(float* p, double x) { *p = static_cast<float>(x); }
AS_ALWAYS_INLINE void Store(BFloat16* p, double x) { *p = ToBFloat16(static_cast<float>(x)); }

}  // namespace allspark::kernels
