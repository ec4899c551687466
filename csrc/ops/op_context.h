// The context that every op needs besides its operands. An op checks shapes and dtypes (AS_CHECK:
// user input was checked long before), counts its time, and has the device compute (device_ops.h).
// Operands lie in the device's memory, so an op cannot look at ids, positions or rows: whoever
// makes them keeps them within bounds (the decoder, when it takes a batch). Ops allocate nothing.
// The step thread calls them.
#pragma once

#include "ops/input_observer.h"
#include "ops/matrix.h"
#include "ops/op_profile.h"

namespace allspark {

class DeviceOps;

// Float32 rows of `floats` elements each, as many as DeviceOps::num_scratch_rows(): for ops whose
// result is int8.
struct RowScratch {
  float* data = nullptr;
  int64_t floats = 0;
};

struct OpContext {
  DeviceOps* ops = nullptr;
  RowScratch row_scratch = {};
  OpProfile* profile = nullptr;       // null: no profiling
  InputObserver* observer = nullptr;  // null: nobody looks at the inputs of products
};

}  // namespace allspark
