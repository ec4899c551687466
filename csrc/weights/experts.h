// The fields of a DecoderSpec about experts: which layers have experts, and whether the fields
// agree. Private to weights/, but for the limits, which are those of kernels
// (model/decoder_shape.cc). Pure functions; any thread.
#pragma once

#include <cstdint>

#include "allspark/status.h"
#include "proto/allspark.pb.h"

namespace allspark::weights {

// Far above any real model, but bounded: routing keeps a token's scores on the stack.
inline constexpr int64_t kMaxExperts = 1024;
inline constexpr int64_t kMaxExpertsPerToken = 32;
inline constexpr int64_t kMaxExpertGroups = 32;

// Whether the MLP of `layer` is a mixture of experts.
bool HasExperts(const proto::DecoderSpec& spec, int64_t layer);

// InvalidArgument that names the field, the value and the bound. `max_width`: the largest width of
// an expert.
Status CheckExperts(const proto::DecoderSpec& spec, int64_t max_width);

// Rows of the router: one for each expert, and the shared expert's gate.
inline int64_t RouterRows(const proto::DecoderSpec& spec) {
  return spec.num_experts() + (spec.shared_gate() ? 1 : 0);
}

}  // namespace allspark::weights
