// What a DecoderSpec says of latent attention, and whether its fields agree. Private to weights/.
// Pure functions; any thread.
#pragma once

#include <cstdint>

#include "allspark/status.h"
#include "proto/allspark.pb.h"

namespace allspark::weights {

// InvalidArgument that names the field, the value and the bound. `max_dim`: of what the cache keeps
// of a token, and of a value; `max_width`: of all heads of one of them.
Status CheckLatents(const proto::DecoderSpec& spec, int64_t max_dim, int64_t max_width);

}  // namespace allspark::weights
