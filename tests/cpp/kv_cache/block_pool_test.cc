#include "kv_cache/block_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "support/alloc_counter.h"

namespace allspark {
namespace {

template <typename F>
std::string MessageOf(F&& f) {
  try {
    f();
  } catch (const InternalError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(BlockPool, GivesEveryBlockOnceAndTheLastFreedFirst) {
  BlockPool pool(3);
  EXPECT_EQ(pool.num_free(), 3);
  EXPECT_EQ(pool.Allocate(), 0);
  EXPECT_EQ(pool.Allocate(), 1);
  EXPECT_EQ(pool.Allocate(), 2);
  EXPECT_EQ(pool.num_free(), 0);
  pool.Release(0);
  pool.Release(2);
  EXPECT_EQ(pool.Allocate(), 2);
  EXPECT_EQ(pool.Allocate(), 0);
}

TEST(BlockPool, SharedBlockIsFreeAfterItsLastReference) {
  BlockPool pool(2);
  const int32_t block = pool.Allocate();
  pool.AddReference(block);
  EXPECT_EQ(pool.reference_count(block), 2);
  pool.Release(block);
  EXPECT_EQ(pool.reference_count(block), 1);
  EXPECT_EQ(pool.num_free(), 1);
  pool.Release(block);
  EXPECT_EQ(pool.reference_count(block), 0);
  EXPECT_EQ(pool.num_free(), 2);
}

TEST(BlockPool, MisuseThrowsAndChangesNothing) {
  BlockPool pool(2);
  EXPECT_NE(MessageOf([&] { pool.Release(0); }).find("block 0 is free already"), std::string::npos);
  EXPECT_NE(MessageOf([&] { pool.AddReference(1); }).find("block 1 is free"), std::string::npos);
  EXPECT_NE(MessageOf([&] { pool.Release(2); }).find("outside [0, 2)"), std::string::npos);
  EXPECT_NE(MessageOf([&] { (void)pool.reference_count(-1); }).find("block is -1"),
            std::string::npos);
  EXPECT_EQ(pool.num_free(), 2);
  pool.Allocate();
  pool.Allocate();
  EXPECT_NE(MessageOf([&] { pool.Allocate(); }).find("none of the 2 blocks"), std::string::npos);
  EXPECT_THROW(BlockPool(-1), InternalError);
  EXPECT_THROW(BlockPool(int64_t{1} << 31), InternalError);
}

TEST(BlockPool, EmptyPoolHasNothing) {
  BlockPool pool(0);
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_THROW(pool.Allocate(), InternalError);
}

TEST(BlockPool, RandomUseKeepsCountsAndAllocatesNothing) {
  constexpr int kBlocks = 17;
  BlockPool pool(kBlocks);
  std::vector<int> expected(kBlocks, 0);
  std::mt19937 random(7);
  testing::AllocationCounter counter;
  for (int i = 0; i < 20000; ++i) {
    const auto block = static_cast<int32_t>(random() % kBlocks);
    const auto free = std::count(expected.begin(), expected.end(), 0);
    ASSERT_EQ(pool.num_free(), free);
    testing::AllocationCounter::Scope scope(&counter);
    switch (random() % 3) {
      case 0:
        if (free > 0) {
          const int32_t taken = pool.Allocate();
          ASSERT_EQ(expected[static_cast<size_t>(taken)]++, 0) << "block " << taken;
        }
        break;
      case 1:
        if (expected[static_cast<size_t>(block)] > 0) {
          pool.AddReference(block);
          ++expected[static_cast<size_t>(block)];
        }
        break;
      default:
        if (expected[static_cast<size_t>(block)] > 0) {
          pool.Release(block);
          --expected[static_cast<size_t>(block)];
        }
    }
    ASSERT_EQ(pool.reference_count(block), expected[static_cast<size_t>(block)]);
  }
  EXPECT_EQ(counter.count(), 0);
}

}  // namespace
}  // namespace allspark
