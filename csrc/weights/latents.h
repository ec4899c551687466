// The fields of a DecoderSpec about latent attention, and whether they agree. Private to weights/.
// Pure functions; any thread.
#pragma once

#include <cstdint>

#include "allspark/status.h"
#include "proto/allspark.pb.h"

namespace allspark::weights {

// InvalidArgument that names the field, the value and the bound. `max_dim`: the largest size of a
// token's cache entry, and of a value head. `max_width`: the largest size of all heads together.
Status CheckLatents(const proto::DecoderSpec& spec, int64_t max_dim, int64_t max_width);

}  // namespace allspark::weights
