#include "engine/admission.h"

#include <gtest/gtest.h>

#include <string>

#include "platform/system_limits.h"

namespace allspark {
namespace {

// 4,000 requests for logits could reserve more memory than the machine has.
TEST(Admission, TensorsAreBoundedByDefault) {
  Admission admission{RuntimeConfig()};
  std::mutex mutex;
  std::unique_lock lock(mutex);
  const auto enter = [&](int64_t tensor_bytes) {
    return admission.Enter(lock, {.num_requests = 1, .tensor_bytes = tensor_bytes}, 0, {});
  };
  const int64_t bound = TotalMemory().bytes / 8;
  EXPECT_TRUE(enter(bound - 5).ok());
  const Status denied = enter(6);
  EXPECT_EQ(denied.as_status(), AsStatus::kRequestDenied);
  EXPECT_EQ(denied.message(), "the output tensors of this request take 6 bytes, beside " +
                                  std::to_string(bound - 5) +
                                  " of others; max_output_tensor_bytes is " +
                                  std::to_string(bound) + ", by default an eighth of the memory");
  EXPECT_EQ(admission.tensor_bytes(), bound - 5);
  EXPECT_TRUE(enter(0).ok()) << "others go on";
  EXPECT_TRUE(enter(5).ok());
  admission.Leave({.num_requests = 1, .tensor_bytes = bound - 5});
  EXPECT_TRUE(enter(6).ok());
  EXPECT_FALSE(enter(bound + 1).ok());
}

}  // namespace
}  // namespace allspark
