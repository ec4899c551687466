// Status and Result<T>: how every expected failure is reported.
//
// A failure is a value with a code (what kind), an AsStatus (DashInfer's status number, for callers
// that switch on it) and a message that names the field, the value and the bound. Nothing in this
// header throws. Any thread may use it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace [[gnu::visibility("default")]] allspark {

enum class StatusCode : int {
  kOk = 0,
  kInvalidArgument = 1,
  kNotFound = 2,
  kResourceExhausted = 3,
  kFailedPrecondition = 4,
  kCancelled = 5,
  kUnimplemented = 6,
  kDataLoss = 7,
  kInternal = 8,
  kDeadlineExceeded = 9,
};

// The status numbers of the DashInfer interface, `ALLSPARK_` prefix left out.
enum class AsStatus : int {
  kSuccess = 0,
  kUnknownError = 1,
  kParamError = 2,
  kIoError = 3,
  kMemoryError = 4,
  kRuntimeError = 5,
  kExceedLimitError = 7,
  kInvalidCallError = 8,
  kEmptyRequest = 9,
  kIllegalRequestId = 10,
  kCacheMemoryOut = 11,
  kRequestDenied = 12,
  kChunkPrefill = 14,
  kDeprecated = 20,
  kLoraNumExceedLimitError = 21,
  kLoraRankExceedLimitError = 22,
  kLoraNotFound = 23,
  kLoraAlreadyLoaded = 24,
  kLoraInUse = 25,
  kStreaming = 200,
};

// The AsStatus of a code, for failures that do not name a more specific one.
AsStatus DefaultAsStatus(StatusCode code);
std::string_view StatusCodeName(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // OK; costs one null pointer.
  Status(StatusCode code, std::string message);
  Status(StatusCode code, AsStatus as_status, std::string message);

  static Status Ok() { return Status(); }
  static Status InvalidArgument(std::string m) {
    return {StatusCode::kInvalidArgument, std::move(m)};
  }
  static Status ExceedLimit(std::string m) {
    return {StatusCode::kInvalidArgument, AsStatus::kExceedLimitError, std::move(m)};
  }
  static Status NotFound(std::string m) { return {StatusCode::kNotFound, std::move(m)}; }
  static Status ResourceExhausted(std::string m) {
    return {StatusCode::kResourceExhausted, std::move(m)};
  }
  static Status FailedPrecondition(std::string m) {
    return {StatusCode::kFailedPrecondition, std::move(m)};
  }
  static Status RequestDenied(std::string m) {
    return {StatusCode::kFailedPrecondition, AsStatus::kRequestDenied, std::move(m)};
  }
  static Status Cancelled(std::string m) { return {StatusCode::kCancelled, std::move(m)}; }
  static Status Unimplemented(std::string m) { return {StatusCode::kUnimplemented, std::move(m)}; }
  static Status DataLoss(std::string m) { return {StatusCode::kDataLoss, std::move(m)}; }
  static Status Internal(std::string m) { return {StatusCode::kInternal, std::move(m)}; }
  static Status DeadlineExceeded(std::string m) {
    return {StatusCode::kDeadlineExceeded, std::move(m)};
  }

  bool ok() const { return rep_ == nullptr; }
  StatusCode code() const { return rep_ ? rep_->code : StatusCode::kOk; }
  AsStatus as_status() const { return rep_ ? rep_->as_status : AsStatus::kSuccess; }
  // Empty when ok.
  const std::string& message() const;
  // "INVALID_ARGUMENT: top_p is 1.5; it must be in [0, 1]".
  std::string ToString() const;

 private:
  struct Rep {
    StatusCode code;
    AsStatus as_status;
    std::string message;
  };
  std::shared_ptr<const Rep> rep_;
};

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit by design.
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: implicit by design.

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  // Requires: ok().
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return std::move(*value_); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace allspark

// Returns the Status from the enclosing function when it is a failure.
#define AS_RETURN_IF_ERROR(expr)             \
  do {                                       \
    ::allspark::Status as_status_ = (expr);  \
    if (!as_status_.ok()) return as_status_; \
  } while (0)

// Assigns the value of a Result to `lhs`, which may declare a variable, or returns its Status from
// the enclosing function. Several statements: not the body of an `if` without braces.
#define AS_ASSIGN_OR_RETURN(lhs, ...) \
  AS_ASSIGN_FROM_OR_RETURN(AS_UNIQUE_NAME(as_result_, __LINE__), lhs, __VA_ARGS__)
#define AS_ASSIGN_FROM_OR_RETURN(result, lhs, ...) \
  auto result = (__VA_ARGS__);                     \
  if (!result.ok()) return result.status();        \
  lhs = *std::move(result)
#define AS_UNIQUE_NAME(name, line) AS_JOIN(name, line)
#define AS_JOIN(name, line) name##line
