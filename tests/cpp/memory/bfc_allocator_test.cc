#include "memory/bfc_allocator.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <limits>

#include "base/check.h"
#include "support/alloc_counter.h"
#include "support/constants.h"
#include "support/environment.h"

namespace allspark {
namespace {

using testing::kMiB;

class BfcOptionsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name :
         {"BFC_ALLOCATOR", "BFC_MEM_RATIO", "BFC_LEFTOVER_MB", "BFC_ALLOW_GROWTH"}) {
      unsetenv(name);
    }
  }
  // FromEnv's message with one variable set.
  static std::string ErrorOf(const char* name, const char* value) {
    const testing::ScopedVariable variable(name, value);
    const auto options = BfcOptions::FromEnv();
    if (options.ok()) return "";
    EXPECT_EQ(options.status().code(), StatusCode::kInvalidArgument);
    return options.status().message();
  }
  static BfcOptions OptionsOf(const char* name, const char* value) {
    const testing::ScopedVariable variable(name, value);
    auto options = BfcOptions::FromEnv();
    EXPECT_TRUE(options.ok()) << options.status().ToString();
    return options.ok() ? *options : BfcOptions();
  }
};

TEST_F(BfcOptionsTest, Defaults) {
  const auto options = BfcOptions::FromEnv();
  ASSERT_TRUE(options.ok());
  EXPECT_TRUE(options.value().enabled);
  EXPECT_EQ(options.value().mem_ratio, 0.9);
  EXPECT_EQ(options.value().leftover_mb, 350);
  EXPECT_TRUE(options.value().allow_growth);
}

TEST_F(BfcOptionsTest, Booleans) {
  for (const char* text : {"ON", "on", "On", "1", "true", "TRUE"}) {
    EXPECT_TRUE(OptionsOf("BFC_ALLOCATOR", text).enabled) << text;
    EXPECT_TRUE(OptionsOf("BFC_ALLOW_GROWTH", text).allow_growth) << text;
  }
  for (const char* text : {"OFF", "off", "0", "false", "False"}) {
    EXPECT_FALSE(OptionsOf("BFC_ALLOCATOR", text).enabled) << text;
    EXPECT_FALSE(OptionsOf("BFC_ALLOW_GROWTH", text).allow_growth) << text;
  }
  for (const char* text : {"", "yes", "2", "ON ", "o"}) {
    EXPECT_EQ(ErrorOf("BFC_ALLOCATOR", text), "BFC_ALLOCATOR is \"" + std::string(text) +
                                                  "\"; it must be ON or OFF (or 1/0, true/false)");
  }
  EXPECT_TRUE(ErrorOf("BFC_ALLOW_GROWTH", "x").starts_with("BFC_ALLOW_GROWTH is \"x\""));
}

TEST_F(BfcOptionsTest, Ratio) {
  EXPECT_EQ(OptionsOf("BFC_MEM_RATIO", "0.5").mem_ratio, 0.5);
  EXPECT_EQ(OptionsOf("BFC_MEM_RATIO", "1").mem_ratio, 1);
  EXPECT_EQ(OptionsOf("BFC_MEM_RATIO", "9.75e-1").mem_ratio, 0.975);
  for (const char* text :
       {"", "0", "0.0", "-0.5", "1.01", "nan", "inf", "90%", "0,9", "0.9 ", " 0.9", "x", "1e999"}) {
    EXPECT_EQ(ErrorOf("BFC_MEM_RATIO", text),
              "BFC_MEM_RATIO is \"" + std::string(text) +
                  "\"; it must be a number above 0 and at most 1, such as 0.9");
  }
}

TEST_F(BfcOptionsTest, Leftover) {
  EXPECT_EQ(OptionsOf("BFC_LEFTOVER_MB", "0").leftover_mb, 0);
  EXPECT_EQ(OptionsOf("BFC_LEFTOVER_MB", "600").leftover_mb, 600);
  for (const char* text :
       {"", "-1", "350MB", "3.5", "1099511627777", "99999999999999999999", "x"}) {
    EXPECT_EQ(ErrorOf("BFC_LEFTOVER_MB", text),
              "BFC_LEFTOVER_MB is \"" + std::string(text) +
                  "\"; it must be a whole number of MiB from 0 to 1099511627776");
  }
}

TEST(CreateCpuBfcAllocatorTest, PoolIsWhatTheRatioLeaves) {
  BfcOptions options;
  options.leftover_mb = 100;
  options.mem_ratio = 0.5;
  for (const bool enabled : {true, false}) {
    options.enabled = enabled;
    auto allocator = CreateCpuBfcAllocator(options, 300 * kMiB);
    ASSERT_TRUE(allocator.ok()) << allocator.status().ToString();
    EXPECT_EQ((*allocator)->Stats().pool_bytes, 100 * kMiB);
    EXPECT_EQ((*allocator)->Stats().largest_free_bytes, 100 * kMiB);
  }
}

TEST(CreateCpuBfcAllocatorTest, NothingLeftIsResourceExhausted) {
  for (const int64_t total : {int64_t{0}, int64_t{-1}, 350 * kMiB, 352 * kMiB}) {
    EXPECT_EQ(CreateCpuBfcAllocator(BfcOptions(), total).status().code(),
              StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(
      CreateCpuBfcAllocator(BfcOptions(), 300 * kMiB).status().message(),
      "no memory for the pool: (300 MiB in all - BFC_LEFTOVER_MB 350) * BFC_MEM_RATIO 0.9 must "
      "be at least 2 MiB");
  EXPECT_EQ(
      CreateCpuBfcAllocator(BfcOptions(), 300 * kMiB, "the limit is 300 MiB").status().message(),
      "no memory for the pool: (300 MiB in all - BFC_LEFTOVER_MB 350) * BFC_MEM_RATIO 0.9 must "
      "be at least 2 MiB; the limit is 300 MiB");
  EXPECT_TRUE(CreateCpuBfcAllocator(BfcOptions(), 353 * kMiB).ok());
}

TEST(CreateCpuBfcAllocatorTest, AddressesThatCannotBeHadNameWhatLimitsThem) {
  // More than any process has.
  const Status status =
      CreateCpuBfcAllocator(BfcOptions(), int64_t{1} << 61, "the limit is 42 bytes").status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(status.message().starts_with("cannot reserve ")) << status.message();
  EXPECT_TRUE(
      status.message().ends_with("; the limit is 42 bytes; a BFC_MEM_RATIO below 0.9 takes less"))
      << status.message();
}

TEST(CreateCpuBfcAllocatorTest, IllegalOptionsAreRefused) {
  BfcOptions options;
  for (const double ratio : {0.0, -1.0, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    options.mem_ratio = ratio;
    EXPECT_EQ(CreateCpuBfcAllocator(options, 1000 * kMiB).status().code(),
              StatusCode::kInvalidArgument);
  }
  options = BfcOptions();
  for (const int64_t leftover : {int64_t{-1}, std::numeric_limits<int64_t>::max()}) {
    options.leftover_mb = leftover;
    EXPECT_EQ(CreateCpuBfcAllocator(options, 1000 * kMiB).status().code(),
              StatusCode::kInvalidArgument);
  }
}

TEST(SystemAllocatorTest, KeepsTheSameStatisticsAndTheBudget) {
  BfcOptions options;
  options.enabled = false;
  options.leftover_mb = 0;
  options.mem_ratio = 1;
  auto created = CreateCpuBfcAllocator(options, 4 * kMiB);
  ASSERT_TRUE(created.ok());
  Allocator& allocator = **created;
  EXPECT_EQ(allocator.Allocate(0), nullptr);
  EXPECT_EQ(allocator.Allocate(4 * kMiB + 1), nullptr);
  EXPECT_EQ(allocator.Allocate(SIZE_MAX), nullptr);
  void* const a = allocator.Allocate(1000);
  void* const b = allocator.Allocate(3 * kMiB);
  ASSERT_NE(a, nullptr);
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % kBufferAlignment, 0u);
  std::memset(b, 1, 3 * kMiB);
  EXPECT_EQ(allocator.Allocate(kMiB), nullptr) << "beyond the budget";
  AllocatorStats stats = allocator.Stats();
  EXPECT_EQ(stats.num_allocs, 2);
  EXPECT_EQ(stats.num_live, 2);
  EXPECT_EQ(stats.bytes_in_use, 3 * kMiB + 1024);
  EXPECT_EQ(stats.largest_free_bytes, kMiB - 1024);
  allocator.Free(b);
  allocator.Free(nullptr);
  char local = 0;
  EXPECT_THROW(allocator.Free(&local), InternalError);
  allocator.Free(a);
  EXPECT_THROW(allocator.Free(a), InternalError);
  stats = allocator.Stats();
  EXPECT_EQ(stats.num_live, 0);
  EXPECT_EQ(stats.bytes_in_use, 0);
}

TEST(SystemAllocatorTest, AFailingHeapGivesNull) {
  if (!testing::CanInjectFailures()) GTEST_SKIP() << "a sanitizer owns malloc";
  BfcOptions options;
  options.enabled = false;
  auto created = CreateCpuBfcAllocator(options, 1000 * kMiB);
  ASSERT_TRUE(created.ok());
  Allocator& allocator = **created;
  testing::HeapFaults faults;
  for (int64_t n = 1; n <= 2; ++n) {
    faults.FailNth(n);
    {
      const testing::HeapFaults::Scope scope(&faults);
      EXPECT_EQ(allocator.Allocate(5000), nullptr);
    }
    EXPECT_EQ(allocator.Stats().num_live, 0);
  }
  void* const ptr = allocator.Allocate(5000);
  EXPECT_NE(ptr, nullptr);
  allocator.Free(ptr);
}

}  // namespace
}  // namespace allspark
