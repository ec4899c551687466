#include <gtest/gtest.h>

#include <cstring>

#include "base/check.h"
#include "memory/allocator.h"
#include "memory/step_arena.h"
#include "memory/system_allocator.h"
#include "support/alloc_counter.h"
#include "support/fault_allocator.h"

namespace allspark {
namespace {

constexpr int64_t kBudget = 1 << 20;

Buffer MakeBuffer(Allocator* allocator, size_t bytes) {
  auto buffer = Buffer::Create(allocator, bytes);
  EXPECT_TRUE(buffer.ok()) << buffer.status().ToString();
  return std::move(buffer).value();
}

TEST(BufferTest, OwnsItsMemory) {
  SystemAllocator allocator(kBudget);
  {
    const Buffer buffer = MakeBuffer(&allocator, 1000);
    EXPECT_NE(buffer.data(), nullptr);
    EXPECT_EQ(buffer.bytes(), 1000u);
    EXPECT_EQ(allocator.Stats().num_live, 1);
  }
  EXPECT_EQ(allocator.Stats().num_live, 0);
}

TEST(BufferTest, MovesWithoutLeaking) {
  SystemAllocator allocator(kBudget);
  {
    Buffer a = MakeBuffer(&allocator, 1000);
    Buffer b = MakeBuffer(&allocator, 2000);
    void* const a_data = a.data();
    b = std::move(a);
    EXPECT_EQ(b.data(), a_data);
    EXPECT_EQ(b.bytes(), 1000u);
    const Buffer c = std::move(b);
    EXPECT_EQ(c.data(), a_data);
  }
  EXPECT_EQ(allocator.Stats().num_live, 0);
}

TEST(BufferTest, ZeroBytesNeedNoAllocation) {
  SystemAllocator allocator(kBudget);
  const Buffer buffer = MakeBuffer(&allocator, 0);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(allocator.Stats().num_allocs, 0);
}

TEST(BufferTest, NoRoomIsResourceExhaustedAndSaysHowMuchThereIs) {
  SystemAllocator allocator(kBudget);
  const Buffer half = MakeBuffer(&allocator, kBudget / 2);
  const auto buffer = Buffer::Create(&allocator, kBudget);
  EXPECT_EQ(buffer.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(buffer.status().as_status(), AsStatus::kMemoryError);
  EXPECT_EQ(buffer.status().message(),
            "cannot allocate 1048576 bytes: the pool has 1048576 bytes, 524288 in use, the largest "
            "free piece 524288");
}

TEST(FaultAllocatorTest, RefusesTheChosenAllocation) {
  SystemAllocator inner(kBudget);
  testing::FaultAllocator allocator(&inner);
  for (int64_t n = 1; n <= 3; ++n) {
    allocator.FailNth(n);
    for (int64_t call = 1; call <= 3; ++call) {
      EXPECT_EQ(Buffer::Create(&allocator, 100).ok(), call != n);
    }
    EXPECT_EQ(allocator.num_refused(), 1);
    EXPECT_EQ(allocator.num_calls(), 3);
  }
  allocator.FailNth(2, /*sticky=*/true);
  EXPECT_TRUE(Buffer::Create(&allocator, 100).ok());
  EXPECT_FALSE(Buffer::Create(&allocator, 100).ok());
  EXPECT_FALSE(Buffer::Create(&allocator, 100).ok());
  allocator.FailNth(0);
  EXPECT_TRUE(Buffer::Create(&allocator, 100).ok());
  EXPECT_EQ(inner.Stats().num_live, 0);
}

TEST(StepArenaTest, BumpsAlignedAndStartsOverOnReset) {
  SystemAllocator allocator(kBudget);
  StepArena arena(MakeBuffer(&allocator, 1024));
  EXPECT_EQ(arena.capacity(), 1024);
  char* const a = static_cast<char*>(arena.Allocate(1));
  float* const b = arena.Allocate<float>(17);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % 64, 0u);
  EXPECT_EQ(reinterpret_cast<char*>(b) - a, 64);
  EXPECT_EQ(arena.used(), 64 + 128);
  arena.Reset();
  EXPECT_EQ(arena.used(), 0);
  EXPECT_EQ(arena.peak(), 64 + 128);
  EXPECT_EQ(arena.Allocate(1024), a);
  EXPECT_EQ(arena.used(), 1024);
  EXPECT_EQ(arena.peak(), 1024);
}

TEST(StepArenaTest, RunningOutIsABrokenInvariant) {
  SystemAllocator allocator(kBudget);
  StepArena arena(MakeBuffer(&allocator, 1000));
  arena.Allocate(900);
  EXPECT_EQ(arena.used(), 960);
  EXPECT_THROW(arena.Allocate(41), InternalError);
  EXPECT_THROW(arena.Allocate(-1), InternalError);
  EXPECT_THROW(arena.Allocate(std::numeric_limits<int64_t>::max()), InternalError);
  EXPECT_NE(arena.Allocate(40), nullptr);
  EXPECT_EQ(arena.used(), 1000) << "the last padding is cut at the end of the buffer";
  EXPECT_NO_THROW(arena.Allocate(0));
  StepArena none;
  EXPECT_EQ(none.capacity(), 0);
  EXPECT_THROW(none.Allocate(1), InternalError);
}

TEST(StepArenaTest, AllocatesNothingFromTheHeap) {
  SystemAllocator allocator(kBudget);
  StepArena arena(MakeBuffer(&allocator, 1 << 16));
  testing::AllocationCounter counter;
  {
    const testing::AllocationCounter::Scope scope(&counter);
    for (int step = 0; step < 10; ++step) {
      arena.Reset();
      for (int i = 0; i < 100; ++i) std::memset(arena.Allocate(100), step, 100);
    }
  }
  EXPECT_EQ(counter.count(), 0);
}

}  // namespace
}  // namespace allspark
