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

TEST(BlockPool, ExtentsDivideThePool) {
  EXPECT_EQ(ExtentBlocks(0), 1);
  EXPECT_EQ(ExtentBlocks(1), 1);
  EXPECT_EQ(ExtentBlocks(6), 2);
  EXPECT_EQ(ExtentBlocks(24), 8);
  EXPECT_EQ(ExtentBlocks(32), 16);
  EXPECT_EQ(ExtentBlocks(4096), 16);
  EXPECT_EQ(BlockPool(48).extent_blocks(), 16);
}

TEST(BlockPool, RoundingUpCostsASixteenthAtMost) {
  EXPECT_EQ(RoundUpToExtents(0), 0);
  EXPECT_EQ(RoundUpToExtents(7), 7);
  EXPECT_EQ(RoundUpToExtents(65), 68);
  EXPECT_EQ(RoundUpToExtents(241), 256);
  for (int64_t n = 0; n < 5000; ++n) {
    const int64_t rounded = RoundUpToExtents(n);
    EXPECT_GE(rounded, n);
    EXPECT_LE(rounded, n + n / 16);
    if (n >= 240) {
      EXPECT_EQ(ExtentBlocks(rounded), kMostExtentBlocks) << n;
    }
  }
}

TEST(BlockPool, ATableGrowsIntoItsNeighbourhood) {
  BlockPool pool(64);
  const int32_t first = pool.Allocate();
  const int32_t second = pool.Allocate();
  EXPECT_EQ(first, 0);
  EXPECT_EQ(second, 16) << "where there is room to grow";
  int32_t last = first;
  for (int i = 1; i < 16; ++i) {
    EXPECT_EQ(pool.Allocate(last), last + 1);
    ++last;
  }
  EXPECT_EQ(pool.Allocate(last), 32) << "an extent of its own: its neighbour is another table's";
  EXPECT_EQ(pool.Allocate(second), second + 1);
}

TEST(BlockPool, TablesShareTheExtentWithTheMostRoom) {
  BlockPool pool(32);
  const int32_t first = pool.Allocate();
  EXPECT_EQ(pool.Allocate(first), 1);
  const int32_t second = pool.Allocate();
  EXPECT_EQ(second, 16);
  const int32_t third = pool.Allocate();
  EXPECT_EQ(third, 17) << "15 are free there, and 14 in the other";
  EXPECT_EQ(pool.Allocate(second), 18) << "its neighbour is taken; 14 were free here, too";
  EXPECT_EQ(pool.Allocate(second), 2);
  EXPECT_EQ(pool.Allocate(18), 19);
  pool.Release(third);
  EXPECT_EQ(pool.Allocate(second), third);
}

TEST(BlockPool, TablesThatDoNotGrowShareExtentsThatAreInUse) {
  BlockPool pool(64);
  EXPECT_EQ(pool.Allocate(BlockPool::kNone, /*grows=*/false), 0) << "none is in use";
  EXPECT_EQ(pool.Allocate(0, /*grows=*/false), 1);
  EXPECT_EQ(pool.Allocate(BlockPool::kNone, /*grows=*/false), 2);
  EXPECT_EQ(pool.Allocate(), 16) << "it grows: an extent of its own";
  for (int32_t block = 17; block < 20; ++block) EXPECT_EQ(pool.Allocate(block - 1), block);
  EXPECT_EQ(pool.Allocate(BlockPool::kNone, /*grows=*/false), 3) << "13 are free there, 12 in 1";
  for (int i = 0; i < 24; ++i) pool.Allocate(BlockPool::kNone, /*grows=*/false);
  EXPECT_EQ(pool.num_free(), 32);
  EXPECT_EQ(pool.Allocate(BlockPool::kNone, /*grows=*/false), 32) << "both are full";
}

TEST(BlockPool, BeginsWithTheLongestRun) {
  BlockPool pool(16);
  for (int32_t i = 0; i < 16; ++i) pool.Allocate(i - 1);
  for (const int32_t block : {1, 2, 5, 6, 7, 9, 10}) pool.Release(block);
  EXPECT_EQ(pool.Allocate(0), 1);
  EXPECT_EQ(pool.Allocate(), 5);
  EXPECT_TRUE(pool.HasRun(5));
  EXPECT_FALSE(pool.HasRun(15));
  EXPECT_FALSE(pool.HasRun(BlockPool::kNone)) << "5 of 16 are free";
  for (const int32_t block : {11, 12, 13}) pool.Release(block);
  EXPECT_TRUE(pool.HasRun(15)) << "8 of 16 are free";
}

TEST(BlockPool, GivesTheLastBlockAfterAnyOther) {
  BlockPool pool(32);
  for (int i = 0; i < 32; ++i) pool.Allocate();
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_FALSE(pool.HasRun(31));
  pool.Release(5);
  EXPECT_EQ(pool.Allocate(31), 5) << "after the pool's last block";
  EXPECT_THROW(pool.Allocate(31), InternalError);
  pool.Release(7);
  EXPECT_NE(MessageOf([&] { pool.Allocate(7); }).find("block 7 is free"), std::string::npos);
  EXPECT_THROW(pool.Allocate(32), InternalError);
}

class BlockPoolUse : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Blocks, BlockPoolUse, ::testing::Values(17, 24, 64));

TEST_P(BlockPoolUse, RandomUseKeepsCountsAndAllocatesNothing) {
  const int kBlocks = GetParam();
  BlockPool pool(kBlocks);
  std::vector<int> expected(static_cast<size_t>(kBlocks), 0);
  std::mt19937 random(7);
  testing::AllocationCounter counter;
  for (int i = 0; i < 20000; ++i) {
    const auto block = static_cast<int32_t>(random() % static_cast<unsigned>(kBlocks));
    const auto free = std::count(expected.begin(), expected.end(), 0);
    ASSERT_EQ(pool.num_free(), free);
    testing::AllocationCounter::Scope scope(&counter);
    switch (random() % 3) {
      case 0:
        if (free > 0) {
          const bool follows = expected[static_cast<size_t>(block)] > 0;
          const int32_t taken =
              pool.Allocate(follows ? block : BlockPool::kNone, /*grows=*/i % 2 == 0);
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
