// Checks every byte of the parameters against the graph: the checksum of each tensor, and zeros
// between tensors. Private to weights/. Any thread.
#pragma once

#include "allspark/status.h"
#include "platform/thread_pool.h"
#include "proto/allspark.pb.h"
#include "weights/file_io.h"

namespace allspark::weights {

// `param`: file.param_bytes() bytes; `mapping`: the mapping of their file, or null. DataLoss naming
// the first damaged tensor and its offset. Requires: the records were checked.
Status VerifyTensors(const proto::ModelFile& file, const unsigned char* param,
                     const Mapping* mapping, ThreadPool* pool);

}  // namespace allspark::weights
