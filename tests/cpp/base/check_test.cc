#include "base/check.h"

#include <gtest/gtest.h>

#include "base/source_path.h"

namespace allspark {
namespace {

std::string MessageOfFailure(int value) {
  try {
    AS_CHECK(value == 1) << "value is " << value;
  } catch (const InternalError& error) {
    return error.what();
  }
  return "";
}

TEST(CheckTest, ThrowsWithPlaceConditionAndText) {
  EXPECT_EQ(MessageOfFailure(1), "");
  const std::string message = MessageOfFailure(2);
  EXPECT_NE(message.find("check_test.cc:"), std::string::npos) << message;
  EXPECT_NE(message.find("check failed: value == 1: value is 2"), std::string::npos) << message;
  EXPECT_EQ(message.find("/"), std::string::npos) << "the build folder shows: " << message;
}

TEST(CheckTest, NeedsNoText) {
  try {
    AS_CHECK(1 + 1 == 3);
    FAIL() << "nothing was thrown";
  } catch (const InternalError& error) {
    EXPECT_TRUE(std::string(error.what()).ends_with("check failed: 1 + 1 == 3")) << error.what();
  }
}

TEST(CheckTest, TextIsNotEvaluatedWhenTheConditionHolds) {
  int evaluated = 0;
  AS_CHECK(true) << ++evaluated;
  EXPECT_EQ(evaluated, 0);
}

TEST(CheckTest, AnElseAfterItBelongsToTheCaller) {
  bool took_else = false;
  const bool condition = false;
  if (condition)
    AS_CHECK(true);
  else
    took_else = true;
  EXPECT_TRUE(took_else);
}

TEST(CheckTest, DcheckIsCheckedInDebugBuildsOnly) {
#ifdef NDEBUG
  EXPECT_NO_THROW(AS_DCHECK(false) << "vanishes");
#else
  EXPECT_THROW(AS_DCHECK(false) << "throws", InternalError);
#endif
}

TEST(SourcePathTest, IsRelativeToTheSourceRoot) {
  EXPECT_EQ(internal::SourcePath("/home/a/csrc/base/check.cc"), "base/check.cc");
  EXPECT_EQ(internal::SourcePath("csrc/base/check.cc"), "base/check.cc");
  EXPECT_EQ(internal::SourcePath("/csrc/copy/csrc/base/x.cc"), "base/x.cc");
  EXPECT_EQ(internal::SourcePath("/home/mycsrc/x.cc"), "x.cc");
  EXPECT_EQ(internal::SourcePath("mycsrc/x.cc"), "x.cc");
  EXPECT_EQ(internal::SourcePath("x.cc"), "x.cc");
  EXPECT_EQ(internal::SourcePath(""), "");
}

}  // namespace
}  // namespace allspark
