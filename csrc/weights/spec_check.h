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

// With the functions and constants that protobuf makes for `type`.
inline Status CheckEnum(const std::string& field, int value, const std::string& type,
                        bool (*is_valid)(int), int max) {
  if (is_valid(value)) return Status::Ok();
  return SpecError(field, std::to_string(value),
                   "a value of " + type + ", 0 to " + std::to_string(max));
}

// `why`: the field that leaves this one unset, and its value.
inline Status CheckUnset(const std::string& field, bool is_set, const char* why) {
  if (!is_set) return Status::Ok();
  return Status::InvalidArgument(field + " is set; " + why + ", which leaves it unset");
}

// For matrices stored one after the other (of experts, of heads): no panel holds columns of two.
inline Status CheckWholePanels(const std::string& field, int64_t value, const char* where) {
  if (value % kPanelColumns == 0) return Status::Ok();
  return SpecError(field, std::to_string(value),
                   "a multiple of " + std::to_string(kPanelColumns) + " where there are " + where);
}

}  // namespace allspark::weights
