#include "platform/numa.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <numeric>

#include "base/check.h"
#include "support/numa_folder.h"

namespace allspark {
namespace {

std::vector<int> From(int begin, int end) {
  std::vector<int> numbers(static_cast<size_t>(end - begin));
  std::iota(numbers.begin(), numbers.end(), begin);
  return numbers;
}

TEST(NumberListTest, IsWhatTheKernelWrites) {
  EXPECT_EQ(ParseNumberList("0"), From(0, 1));
  EXPECT_EQ(ParseNumberList("0-3"), From(0, 4));
  EXPECT_EQ(ParseNumberList("0-1,4,6-7"), (std::vector<int>{0, 1, 4, 6, 7}));
}

TEST(NumberListTest, AnythingElseIsNone) {
  for (const char* text : {"", "a", "-1", "3-1", "0,", ",0", "0-", "0 1", "1,1", "2,1", "0-3,2",
                           "0-99999999999", "0-2000000", "0x1"}) {
    EXPECT_EQ(ParseNumberList(text), std::vector<int>()) << text;
  }
}

class NumaNodesTest : public ::testing::Test {
 protected:
  std::vector<NumaNode> Nodes(const std::vector<int>& cores) const {
    return ReadNumaNodes(folder_.path(), cores);
  }

  testing::NumaFolder folder_;
};

TEST_F(NumaNodesTest, OneTwoAndFourNodes) {
  folder_.Write("0", {{0, "0-7"}});
  EXPECT_EQ(Nodes(From(0, 8)), (std::vector<NumaNode>{{0, From(0, 8)}}));
  folder_.Write("0-1", {{0, "0-3"}, {1, "4-7"}});
  EXPECT_EQ(Nodes(From(0, 8)), (std::vector<NumaNode>{{0, From(0, 4)}, {1, From(4, 8)}}));
  folder_.Write("0-3", {{0, "0,4"}, {1, "1,5"}, {2, "2,6"}, {3, "3,7"}});
  EXPECT_EQ(Nodes(From(0, 8)),
            (std::vector<NumaNode>{{0, {0, 4}}, {1, {1, 5}}, {2, {2, 6}}, {3, {3, 7}}}));
}

TEST_F(NumaNodesTest, IdsMayHaveHoles) {
  folder_.Write("0,2,8", {{0, "0-1"}, {2, "2-3"}, {8, "8-9"}});
  EXPECT_EQ(Nodes({0, 1, 2, 3, 8, 9}),
            (std::vector<NumaNode>{{0, {0, 1}}, {2, {2, 3}}, {8, {8, 9}}}));
}

TEST_F(NumaNodesTest, ACpusetLeavesSomeCoresAndNodesOut) {
  folder_.Write("0-2", {{0, "0-3"}, {1, "4-7"}, {2, "8-11"}});
  EXPECT_EQ(Nodes({1, 3, 9}), (std::vector<NumaNode>{{0, {1, 3}}, {2, {9}}}));
}

TEST_F(NumaNodesTest, NodesOfMemoryAloneHaveNoThreads) {
  folder_.Write("0-1", {{0, "0-3"}, {1, ""}});
  EXPECT_EQ(Nodes(From(0, 4)), (std::vector<NumaNode>{{0, From(0, 4)}}));
}

TEST_F(NumaNodesTest, WhatCannotBeReadIsOneNode) {
  const std::vector<NumaNode> one = {{0, From(0, 4)}};
  EXPECT_EQ(ReadNumaNodes(folder_.path() + "/missing", From(0, 4)), one);
  EXPECT_EQ(Nodes(From(0, 4)), one);
  folder_.Write("0-1", {{0, "0-1"}});  // The cores of node 1 are unknown.
  EXPECT_EQ(Nodes(From(0, 4)), one);
  folder_.Write("zero", {{0, "0-3"}});
  EXPECT_EQ(Nodes(From(0, 4)), one);
}

TEST_F(NumaNodesTest, ThisMachineHasThem) {
  const std::vector<NumaNode> nodes = ReadNumaNodes(kNumaDirectory, {0});
  ASSERT_EQ(nodes.size(), 1u);
  EXPECT_EQ(nodes[0].cores, std::vector<int>{0});
}

const std::vector<NumaNode> kTwo = {{0, {0, 2, 4, 6}}, {1, {1, 3, 5, 7}}};

TEST(NumaPlacementTest, ThreadsOfANodeFollowEachOther) {
  const NumaPlacement all(kTwo, 8);
  EXPECT_EQ(all.cores(), (std::vector<int>{0, 2, 4, 6, 1, 3, 5, 7}));
  EXPECT_EQ(all.caller_cores(), (std::vector<int>{0, 2, 4, 6}));
  EXPECT_EQ(NumaPlacement(kTwo, 4).cores(), (std::vector<int>{0, 2, 1, 3}));
}

TEST(NumaPlacementTest, ANodeHasThreadsByItsShareOfTheCores) {
  const std::vector<NumaNode> uneven = {{0, {0, 1, 2, 3, 4, 5}}, {3, {8, 9}}};
  EXPECT_EQ(NumaPlacement(uneven, 4).cores(), (std::vector<int>{0, 1, 2, 8}));
  EXPECT_EQ(NumaPlacement(uneven, 8).cores(), (std::vector<int>{0, 1, 2, 3, 4, 5, 8, 9}));
  const NumaPlacement one(kTwo, 1);  // Not every node needs to have one.
  EXPECT_EQ(one.cores(), std::vector<int>{1});
  EXPECT_EQ(one.caller_cores(), (std::vector<int>{1, 3, 5, 7}));
}

TEST(NumaPlacementTest, MoreThreadsThanCoresAreRefused) {
  EXPECT_THROW(NumaPlacement(kTwo, 9), InternalError);
  EXPECT_THROW(NumaPlacement(kTwo, 0), InternalError);
}

// What was bound, in pages from the beginning of an area.
class BoundPagesTest : public ::testing::Test {
 protected:
  struct Call {
    int64_t begin, end;
    std::vector<int> nodes;
    bool operator==(const Call&) const = default;
  };

  BoundPagesTest() : area_(static_cast<size_t>(64 * page_)) {
    const auto address = reinterpret_cast<uintptr_t>(area_.data());
    const auto page = static_cast<uintptr_t>(page_);
    first_page_ = area_.data() + (page - address % page) % page;
  }
  NumaPlacement Placement(const std::vector<NumaNode>& nodes, int num_threads, int error = 0) {
    return NumaPlacement(nodes, num_threads,
                         [this, error](void* begin, size_t bytes, std::span<const int> bound) {
                           const int64_t offset = static_cast<unsigned char*>(begin) - first_page_;
                           EXPECT_EQ(offset % page_, 0);
                           EXPECT_EQ(static_cast<int64_t>(bytes) % page_, 0);
                           calls_.push_back({offset / page_,
                                             (offset + static_cast<int64_t>(bytes)) / page_,
                                             {bound.begin(), bound.end()}});
                           return error;
                         });
  }

  const int64_t page_ = sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> area_;
  unsigned char* first_page_ = nullptr;
  std::vector<Call> calls_;
};

TEST_F(BoundPagesTest, EachNodeGetsTheShareOfItsThreads) {
  Placement(kTwo, 8).Bind(first_page_, 32 * page_, 1);
  EXPECT_EQ(calls_, (std::vector<Call>{{0, 16, {0}}, {16, 32, {1}}}));
  calls_.clear();
  Placement({{0, From(0, 6)}, {3, {8, 9}}}, 8).Bind(first_page_, 8, 4 * page_);
  EXPECT_EQ(calls_, (std::vector<Call>{{0, 24, {0}}, {24, 32, {3}}}));
}

TEST_F(BoundPagesTest, PagesThatHoldSomethingElseAreLeftAlone) {
  Placement(kTwo, 8).Bind(first_page_ + 100, 32 * page_, 1);
  EXPECT_EQ(calls_, (std::vector<Call>{{1, 16, {0}}, {17, 32, {1}}}));
  calls_.clear();
  Placement(kTwo, 8).Bind(first_page_ + 100, page_, 1);
  EXPECT_EQ(calls_, std::vector<Call>());
}

TEST_F(BoundPagesTest, APartOfTwoNodesIsItsMiddles) {
  const std::vector<NumaNode> three = {{0, {0}}, {1, {1}}, {2, {2}}};
  Placement(three, 3).Bind(first_page_, 4, page_);  // Cuts at 4 / 3 and 8 / 3.
  EXPECT_EQ(calls_, (std::vector<Call>{{0, 1, {0}}, {1, 3, {1}}, {3, 4, {2}}}));
}

TEST_F(BoundPagesTest, FewerPartsThanNodesLieOnAllInTurn) {
  Placement(kTwo, 8).Bind(first_page_, 1, 10 * page_);
  EXPECT_EQ(calls_, (std::vector<Call>{{0, 10, {0, 1}}}));
}

TEST_F(BoundPagesTest, ARefusalIsSaidOnce) {
  const NumaPlacement placement = Placement(kTwo, 8, EPERM);
  ::testing::internal::CaptureStderr();
  placement.Bind(first_page_, 4, page_);
  placement.Bind(first_page_, 4, page_);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(calls_.size(), 4u);
  const std::string said = "memory cannot be bound to NUMA node 0: Operation not permitted";
  const size_t at = log.find(said);
  ASSERT_NE(at, std::string::npos) << log;
  EXPECT_EQ(log.find("cannot be bound", at + said.size()), std::string::npos) << log;
}

TEST(BindPagesTest, TheSystemTakesItOrSaysWhyNot) {
  const auto bytes = static_cast<size_t>(4 * sysconf(_SC_PAGESIZE));
  void* const pages =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  const std::vector<int> cores = {0};
  const std::vector<int> node = {ReadNumaNodes(kNumaDirectory, cores).front().id};
  const int error = BindPages(pages, bytes, node);
  // A sandbox may allow no such call; a kernel may have none.
  EXPECT_TRUE(error == 0 || error == EPERM || error == ENOSYS) << error;
  static_cast<unsigned char*>(pages)[0] = 1;
  EXPECT_NE(BindPages(pages, bytes, std::vector<int>{1000}), 0);  // There is no such node.
  EXPECT_EQ(munmap(pages, bytes), 0);
}

}  // namespace
}  // namespace allspark
