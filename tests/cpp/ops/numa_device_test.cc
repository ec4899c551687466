// The CPU as a device whose memory lies on NUMA nodes: what is bound to which node, and that
// nothing else changes. Nodes are made up; the system is never asked.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "memory/system_allocator.h"
#include "ops/cpu/cpu_device.h"
#include "ops/cpu/kv_layout.h"
#include "ops/kv_memory.h"

namespace allspark {
namespace {

class NumaDeviceTest : public ::testing::Test {
 protected:
  // Threads 0 and 1 on node 0, thread 2 on node 3.
  NumaDeviceTest() {
    const std::vector<NumaNode> nodes = {{0, {0, 1}}, {3, {2}}};
    const auto bind = [this](void* begin, size_t bytes, std::span<const int> bound) {
      for (size_t at = 0; at < bytes; at += page_) {
        const unsigned char* const page = static_cast<unsigned char*>(begin) + at;
        EXPECT_TRUE(nodes_.emplace(page, std::vector<int>(bound.begin(), bound.end())).second);
      }
      return 0;
    };
    device_ = std::make_unique<CpuDevice>(CpuDevice::Parts{
        std::make_shared<SystemAllocator>(int64_t{1} << 30), std::make_shared<ThreadPool>(3, false),
        kernels::DefaultTable(), 0, std::make_shared<const NumaPlacement>(nodes, 3, bind)});
  }
  // Where the whole pages of a range lie: every one of them on these nodes.
  void ExpectOn(const unsigned char* begin, int64_t bytes, const std::vector<int>& nodes) {
    const auto address = reinterpret_cast<uintptr_t>(begin);
    int64_t at = static_cast<int64_t>((page_ - address % page_) % page_);
    for (; at + static_cast<int64_t>(page_) <= bytes; at += static_cast<int64_t>(page_)) {
      const auto found = nodes_.find(begin + at);
      ASSERT_NE(found, nodes_.end()) << "byte " << at << " of " << bytes;
      EXPECT_EQ(found->second, nodes) << "byte " << at << " of " << bytes;
    }
  }

  const size_t page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::map<const unsigned char*, std::vector<int>> nodes_;  // by page
  std::unique_ptr<CpuDevice> device_;
};

TEST_F(NumaDeviceTest, WeightsAreCopiedToTheThreadsThatReadThem) {
  EXPECT_TRUE(device_->copies_weights());
  EXPECT_FALSE(device_->has_own_memory());
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{2}, page_, 31 * page_ + 6}) {
    std::vector<unsigned char> weight(bytes);
    std::iota(weight.begin(), weight.end(), static_cast<unsigned char>(3));
    for (const int pieces : {1, 2}) {
      std::vector<unsigned char> copy(bytes);
      nodes_.clear();
      device_->CopyWeight(copy.data(), weight.data(), bytes, pieces);
      EXPECT_EQ(copy, weight) << bytes << " bytes in " << pieces;
      if (bytes % static_cast<size_t>(pieces) != 0) continue;
      const int64_t piece_bytes = static_cast<int64_t>(bytes) / pieces;
      for (int piece = 0; piece < pieces; ++piece) {
        const unsigned char* const begin = copy.data() + piece * piece_bytes;
        const int64_t of_node_0 = (4 * piece_bytes + 3) / 6;  // two of three threads
        ExpectOn(begin, of_node_0, {0});
        ExpectOn(begin + of_node_0, piece_bytes - of_node_0, {3});
      }
    }
  }
}

TEST_F(NumaDeviceTest, HeadsLieWithTheThreadsThatReadThem) {
  const KvShape shape{DType::kBFloat16, 5, 3, 64, 32};
  nodes_.clear();
  const KvMemory memory = std::move(*KvMemory::Create(*device_, shape, 7));
  std::map<int64_t, int64_t> bytes_of;  // by head
  cpu::ForEachPart(memory.pool(), [&](const kernels::PagedKv& kv,
                                      const kernels::PagedKv::Side& side, int64_t head) {
    for (int64_t block = 0; block < 7; ++block) {
      bytes_of[head] += side.block_stride;
      const std::vector<int> nodes = {head < 2 ? 0 : 3};
      ExpectOn(kv.PartAt(block, side, head), side.block_stride, nodes);
    }
  });
  EXPECT_EQ(bytes_of.size(), 3u);
  EXPECT_EQ(std::accumulate(bytes_of.begin(), bytes_of.end(), int64_t{0},
                            [](int64_t sum, const auto& each) { return sum + each.second; }),
            memory.bytes());
}

TEST_F(NumaDeviceTest, OneHeadLiesOnAllNodesInTurn) {
  const KvShape shape{DType::kInt8, 2, 1, 128, 16};
  nodes_.clear();
  const KvMemory memory = std::move(*KvMemory::Create(*device_, shape, 16));
  ExpectOn(memory.pool().data, memory.bytes(), {0, 3});
}

TEST(CpuDeviceTest, WithoutNodesMemoryLiesWhereItIs) {
  SystemAllocator allocator(int64_t{1} << 20);
  ThreadPool pool(1, false);
  CpuDevice device(allocator, pool, *kernels::DefaultTable());
  EXPECT_FALSE(device.copies_weights());
  const int weight = 7;
  int copy = 0;
  device.CopyWeight(&copy, &weight, sizeof(copy), 1);
  EXPECT_EQ(copy, 7);
}

// No two parts of the pool share a byte, and all of it is used.
TEST(KvLayoutTest, PartsFillThePool) {
  for (const DType dtype : {DType::kFloat32, DType::kInt8, DType::kInt8UInt4, DType::kUInt4}) {
    for (const int64_t num_blocks : {1, 2, 7, 16, 48}) {
      const KvShape shape{dtype, 3, 2, 32, 16};
      std::vector<unsigned char> memory(static_cast<size_t>(num_blocks * cpu::KvBlockBytes(shape)));
      const KvPool pool{shape, memory.data(), num_blocks};
      cpu::ForEachPart(
          pool, [&](const kernels::PagedKv& kv, const kernels::PagedKv::Side& side, int64_t head) {
            for (int64_t block = 0; block < num_blocks; ++block) {
              unsigned char* const part = kv.PartAt(block, side, head);
              ASSERT_GE(part, memory.data());
              ASSERT_LE(part + side.block_stride, memory.data() + memory.size());
              for (int64_t i = 0; i < side.block_stride; ++i) ++part[i];
            }
          });
      EXPECT_EQ(std::count(memory.begin(), memory.end(), 1),
                static_cast<std::ptrdiff_t>(memory.size()));
    }
  }
}

}  // namespace
}  // namespace allspark
