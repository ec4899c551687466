// Helpers of the checks of a DecoderSpec: errors that name the field, the value and the bound.
// Private to weights/. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "allspark/status.h"
#include "weights/format.h"

namespace allspark::weights {

inline Status SpecError(const std::string& field, const std::string& value,
                        const std::string& bound) {
  return Status::InvalidArgument(field + " is " + value + "; it must be " + bound);
}

inline Status CheckInt(const std::string& field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return Status::Ok();
  return SpecError(field, std::to_string(value),
                   "in [" + std::to_string(min) + ", " + std::to_string(max) + "]");
}

// For matrices stored one after the other (of experts, of heads): no panel holds columns of two.
inline Status CheckWholePanels(const std::string& field, int64_t value, const char* where) {
  if (value % kPanelColumns == 0) return Status::Ok();
  return SpecError(field, std::to_string(value),
                   "a multiple of " + std::to_string(kPanelColumns) + " where there are " + where);
}

}  // namespace allspark::weights
