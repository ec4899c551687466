// The order of the input features of a reordered weight. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "allspark/status.h"
#include "weights/model_reader.h"

namespace allspark {

// order[j]: the input feature of column j of the weight `tensor`, which has `cols` columns. Null if
// the columns are not reordered. DataLoss naming tensor and file if the order is no permutation.
Result<const int32_t*> InputOrder(const ModelReader& reader, const std::string& tensor,
                                  int64_t cols);

}  // namespace allspark
