// The order in which a reordered weight has its input features. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "allspark/status.h"
#include "weights/model_reader.h"

namespace allspark {

// order[j]: the input feature of column j of the weight `tensor`, which has `cols`; null where the
// columns are in place. DataLoss naming tensor and file where it is no permutation.
Result<const int32_t*> InputOrder(const ModelReader& reader, const std::string& tensor,
                                  int64_t cols);

}  // namespace allspark
