// A readable description of a serialised model, which tools and the binding print. Not a format to
// parse. Any thread.
#pragma once

#include <string>

#include "weights/model_reader.h"

namespace allspark {

// Several lines: versions, the spec field by field, and one line per tensor with dtype, shape,
// layout, offset, bytes and checksum.
std::string DescribeModel(const ModelReader& reader);

}  // namespace allspark
