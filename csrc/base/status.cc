#include "allspark/status.h"

namespace allspark {

AsStatus DefaultAsStatus(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return AsStatus::kSuccess;
    case StatusCode::kInvalidArgument:
    case StatusCode::kNotFound:
    case StatusCode::kUnimplemented:
      return AsStatus::kParamError;
    case StatusCode::kResourceExhausted:
      return AsStatus::kMemoryError;
    case StatusCode::kFailedPrecondition:
      return AsStatus::kInvalidCallError;
    case StatusCode::kDataLoss:
      return AsStatus::kIoError;
    case StatusCode::kCancelled:
    case StatusCode::kInternal:
    case StatusCode::kDeadlineExceeded:
      return AsStatus::kRuntimeError;
  }
  return AsStatus::kUnknownError;
}

std::string_view StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "OK";
    case StatusCode::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case StatusCode::kNotFound:
      return "NOT_FOUND";
    case StatusCode::kResourceExhausted:
      return "RESOURCE_EXHAUSTED";
    case StatusCode::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case StatusCode::kCancelled:
      return "CANCELLED";
    case StatusCode::kUnimplemented:
      return "UNIMPLEMENTED";
    case StatusCode::kDataLoss:
      return "DATA_LOSS";
    case StatusCode::kInternal:
      return "INTERNAL";
    case StatusCode::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
  }
  return "UNKNOWN";
}

Status::Status(StatusCode code, std::string message)
    : Status(code, DefaultAsStatus(code), std::move(message)) {}

Status::Status(StatusCode code, AsStatus as_status, std::string message) {
  if (code == StatusCode::kOk) return;
  rep_ = std::make_shared<const Rep>(Rep{code, as_status, std::move(message)});
}

const std::string& Status::message() const {
  static const std::string empty;
  return rep_ ? rep_->message : empty;
}

std::string Status::ToString() const {
  if (ok()) return "OK";
  std::string text(StatusCodeName(rep_->code));
  text += ": ";
  text += rep_->message;
  return text;
}

}  // namespace allspark
