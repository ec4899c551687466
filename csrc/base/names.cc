// Names of the public enumerations.
#include "allspark/engine.h"

namespace allspark {

std::string_view FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return "";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kInterrupted:
      return "interrupted";
    case FinishReason::kError:
      return "error";
    case FinishReason::kDeadline:
      return "deadline";
  }
  return "unknown";
}

std::string_view ModelStateName(ModelState state) {
  switch (state) {
    case ModelState::kInitial:
      return "Initial";
    case ModelState::kRunning:
      return "Running";
    case ModelState::kStop:
      return "Stop";
    case ModelState::kReleased:
      return "Released";
  }
  return "unknown";
}

}  // namespace allspark
