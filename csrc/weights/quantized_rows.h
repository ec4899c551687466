// Stores float rows of a quantised weight: quantises them strip by strip on the pool and gives the
// values, scales and zero points to their TensorWriters. Private to weights/. One thread at a time.
#pragma once

#include "allspark/status.h"
#include "platform/thread_pool.h"
#include "weights/quantize.h"
#include "weights/tensor_writer.h"

namespace allspark::weights {

struct QuantTargets {
  TensorWriter* values = nullptr;
  TensorWriter* scales = nullptr;
  TensorWriter* zeros = nullptr;  // null when symmetric
};

// As TensorWriter::StoreRows, for all targets. `tensor`: the tensor of the values.
Status StoreQuantizedRows(const RequiredTensor& tensor, const QuantFormat& format,
                          const QuantTargets& targets, int64_t row_begin, const RowSource& source,
                          PackBuffers& buffers, ThreadPool* pool);

}  // namespace allspark::weights
