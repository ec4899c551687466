#include "platform/float_mode.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>

#include "platform/thread_pool.h"
#include "support/float_mode.h"

namespace allspark {
namespace {

using testing::FlushedFloats;

bool SubnormalsStay() {
  volatile float smallest = std::numeric_limits<float>::min();
  return smallest / 2 != 0;
}

TEST(DefaultFloatModeTest, HoldsWhileTheObjectLives) {
  EXPECT_TRUE(DefaultFloatMode::IsHere() && SubnormalsStay());
  const FlushedFloats flushed;
  EXPECT_TRUE(!DefaultFloatMode::IsHere() && !SubnormalsStay());
  {
    const DefaultFloatMode mode;
    EXPECT_TRUE(DefaultFloatMode::IsHere() && SubnormalsStay());
  }
  EXPECT_TRUE(!DefaultFloatMode::IsHere() && !SubnormalsStay());
}

TEST(DefaultFloatModeTest, WorkersDoNotInheritAnother) {
  const FlushedFloats flushed;
  ThreadPool pool(3);
  bool is_default[3] = {};
  pool.ForEachThread([&](int thread) { is_default[thread] = DefaultFloatMode::IsHere(); });
  EXPECT_FALSE(is_default[0]) << "the caller's own mode is the caller's";
  EXPECT_TRUE(is_default[1] && is_default[2]);
}

}  // namespace
}  // namespace allspark
