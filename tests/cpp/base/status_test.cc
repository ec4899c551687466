#include "allspark/status.h"

#include <gtest/gtest.h>

#include <memory>

#include "allspark/engine.h"

namespace allspark {
namespace {

TEST(StatusTest, OkHasNoMessage) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kOk);
  EXPECT_EQ(status.as_status(), AsStatus::kSuccess);
  EXPECT_EQ(status.message(), "");
  EXPECT_EQ(status.ToString(), "OK");
  EXPECT_TRUE(Status(StatusCode::kOk, "ignored").ok());
  EXPECT_TRUE(Status::Ok().ok());
}

TEST(StatusTest, KeepsCodeMessageAndAsStatus) {
  const Status status = Status::InvalidArgument("top_p is 1.5; it must be in [0, 1]");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.as_status(), AsStatus::kParamError);
  EXPECT_EQ(status.ToString(), "INVALID_ARGUMENT: top_p is 1.5; it must be in [0, 1]");
  const Status copy = status;
  EXPECT_EQ(copy.message(), status.message());
}

TEST(StatusTest, DefaultAsStatusOfEveryCode) {
  const std::pair<Status, AsStatus> cases[] = {
      {Status::InvalidArgument("m"), AsStatus::kParamError},
      {Status::ExceedLimit("m"), AsStatus::kExceedLimitError},
      {Status::NotFound("m"), AsStatus::kParamError},
      {Status::ResourceExhausted("m"), AsStatus::kMemoryError},
      {Status::FailedPrecondition("m"), AsStatus::kInvalidCallError},
      {Status::RequestDenied("m"), AsStatus::kRequestDenied},
      {Status::Cancelled("m"), AsStatus::kRuntimeError},
      {Status::Unimplemented("m"), AsStatus::kParamError},
      {Status::DataLoss("m"), AsStatus::kIoError},
      {Status::Internal("m"), AsStatus::kRuntimeError},
      {Status::DeadlineExceeded("m"), AsStatus::kRuntimeError},
  };
  for (const auto& [status, as_status] : cases) {
    EXPECT_EQ(status.as_status(), as_status) << status.ToString();
    EXPECT_EQ(status.message(), "m");
  }
  EXPECT_EQ(DefaultAsStatus(static_cast<StatusCode>(99)), AsStatus::kUnknownError);
}

TEST(StatusTest, EveryCodeHasItsOwnName) {
  std::vector<std::string_view> names;
  for (int code = 0; code <= 9; ++code) {
    const std::string_view name = StatusCodeName(static_cast<StatusCode>(code));
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 0) << name;
    EXPECT_NE(name, "UNKNOWN");
    names.push_back(name);
  }
  EXPECT_EQ(StatusCodeName(static_cast<StatusCode>(99)), "UNKNOWN");
}

Result<std::unique_ptr<int>> MakeInt(bool fail) {
  if (fail) return Status::NotFound("no int");
  return std::make_unique<int>(7);
}

Status UseInt(bool fail) {
  auto result = MakeInt(fail);
  AS_RETURN_IF_ERROR(result.status());
  return Status::Cancelled("used " + std::to_string(**result));
}

Result<int> AddInts(bool fails) {
  AS_ASSIGN_OR_RETURN(std::unique_ptr<int> sum, MakeInt(false));
  AS_ASSIGN_OR_RETURN(const std::unique_ptr<int> other, MakeInt(fails));
  const int total = *sum + *other;
  AS_ASSIGN_OR_RETURN(sum, MakeInt(false));
  return total + *sum;
}

TEST(ResultTest, HoldsAValueOrAStatus) {
  auto good = MakeInt(false);
  ASSERT_TRUE(good.ok());
  EXPECT_TRUE(good.status().ok());
  const std::unique_ptr<int> moved = std::move(good).value();
  EXPECT_EQ(*moved, 7);
  EXPECT_FALSE(MakeInt(true).ok());
  EXPECT_EQ(UseInt(true).code(), StatusCode::kNotFound);
  EXPECT_EQ(UseInt(false).message(), "used 7");
  EXPECT_EQ(AddInts(true).status().message(), "no int");
  EXPECT_EQ(*AddInts(false), 21);
}

TEST(NamesTest, FinishReasons) {
  EXPECT_EQ(FinishReasonName(FinishReason::kNone), "");
  EXPECT_EQ(FinishReasonName(FinishReason::kStop), "stop");
  EXPECT_EQ(FinishReasonName(FinishReason::kLength), "length");
  EXPECT_EQ(FinishReasonName(FinishReason::kCancelled), "cancelled");
  EXPECT_EQ(FinishReasonName(FinishReason::kInterrupted), "interrupted");
  EXPECT_EQ(FinishReasonName(FinishReason::kError), "error");
  EXPECT_EQ(FinishReasonName(static_cast<FinishReason>(77)), "unknown");
}

TEST(NamesTest, ModelStates) {
  EXPECT_EQ(ModelStateName(ModelState::kInitial), "Initial");
  EXPECT_EQ(ModelStateName(ModelState::kRunning), "Running");
  EXPECT_EQ(ModelStateName(ModelState::kStop), "Stop");
  EXPECT_EQ(ModelStateName(ModelState::kReleased), "Released");
}

}  // namespace
}  // namespace allspark
