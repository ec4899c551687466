#include "memory/bfc_region.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "base/check.h"
#include "memory/poison.h"
#include "support/alloc_counter.h"
#include "support/constants.h"

namespace allspark {
namespace {

using testing::kMiB;
constexpr int64_t kAlignment = static_cast<int64_t>(kBufferAlignment);

std::unique_ptr<BfcRegion> MakeRegion(int64_t bytes, bool grow = true) {
  auto region = BfcRegion::Create(bytes, grow);
  EXPECT_TRUE(region.ok()) << region.status().ToString();
  return std::move(region).value();
}

// Bytes of a region's pages that are resident in memory. The range itself is queried: the process's
// total would include a sanitizer's shadow.
int64_t ResidentBytes(const BfcRegion& region) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t slice = 256 * kMiB;
  std::vector<unsigned char> pages(static_cast<size_t>(slice / page));
  int64_t resident = 0;
  const int64_t total = region.Stats().pool_bytes;
  for (int64_t at = 0; at < total; at += slice) {
    const int64_t bytes = std::min(slice, total - at);
    EXPECT_EQ(mincore(region.base() + at, static_cast<size_t>(bytes), pages.data()), 0);
    const size_t num_pages = static_cast<size_t>(bytes / page);
    if (std::memchr(pages.data(), 1, num_pages) == nullptr) continue;  // Most of a large region.
    const auto end = pages.begin() + bytes / page;
    resident += page * std::count_if(pages.begin(), end, [](unsigned char p) { return p & 1; });
  }
  return resident;
}

#define EXPECT_CONSISTENT(region)                            \
  do {                                                       \
    const Status consistency = (region)->CheckConsistency(); \
    EXPECT_TRUE(consistency.ok()) << consistency.ToString(); \
  } while (0)

TEST(BfcRegionTest, AFreshRegionIsOneFreeChunk) {
  const auto region = MakeRegion(64 * kMiB + 12345);
  const AllocatorStats stats = region->Stats();
  EXPECT_EQ(stats.pool_bytes, 64 * kMiB);
  EXPECT_EQ(stats.largest_free_bytes, 64 * kMiB);
  EXPECT_EQ(stats.num_live, 0);
  EXPECT_CONSISTENT(region);
}

TEST(BfcRegionTest, TooSmallARegionIsRefused) {
  EXPECT_EQ(BfcRegion::Create(2 * kMiB - 1, true).status().message(),
            "the memory region is 2097151 bytes; it must be at least 2097152");
  EXPECT_EQ(BfcRegion::Create(-5, true).status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(BfcRegion::Create(2 * kMiB, true).ok());
}

TEST(BfcRegionTest, MoreAddressSpaceThanThereIsIsResourceExhausted) {
  const auto region = BfcRegion::Create(int64_t{1} << 60, true);
  EXPECT_EQ(region.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(region.status().message().find("cannot reserve 1152921504606846976 bytes"),
            std::string::npos)
      << region.status().message();
}

TEST(BfcRegionTest, AllocationsAreAlignedWritableAndCounted) {
  const auto region = MakeRegion(8 * kMiB);
  std::vector<void*> live;
  int64_t expected = 0;
  for (const size_t bytes : {1u, 255u, 256u, 257u, 4096u, 1000000u}) {
    void* const ptr = region->Allocate(bytes);
    ASSERT_NE(ptr, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(ptr) % kBufferAlignment, 0u);
    std::memset(ptr, 0xab, bytes);
    live.push_back(ptr);
    expected += (static_cast<int64_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  }
  AllocatorStats stats = region->Stats();
  EXPECT_EQ(stats.num_allocs, 6);
  EXPECT_EQ(stats.num_live, 6);
  EXPECT_EQ(stats.bytes_in_use, expected);
  EXPECT_EQ(stats.largest_free_bytes, 8 * kMiB - expected);
  EXPECT_CONSISTENT(region);
  for (void* ptr : live) region->Free(ptr);
  stats = region->Stats();
  EXPECT_EQ(stats.num_allocs, 6);
  EXPECT_EQ(stats.num_live, 0);
  EXPECT_EQ(stats.bytes_in_use, 0);
  EXPECT_EQ(stats.largest_free_bytes, 8 * kMiB);
  EXPECT_CONSISTENT(region);
}

TEST(BfcRegionTest, NothingAndTooMuchGiveNull) {
  const auto region = MakeRegion(4 * kMiB);
  EXPECT_EQ(region->Allocate(0), nullptr);
  EXPECT_EQ(region->Allocate(4 * kMiB + 1), nullptr);
  EXPECT_EQ(region->Allocate(SIZE_MAX), nullptr);
  EXPECT_EQ(region->Allocate(SIZE_MAX - 100), nullptr);
  region->Free(nullptr);
  EXPECT_EQ(region->Stats().num_allocs, 0);
  void* const all = region->Allocate(4 * kMiB);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(region->Stats().largest_free_bytes, 0);
  EXPECT_EQ(region->Allocate(1), nullptr);
  EXPECT_CONSISTENT(region);
  region->Free(all);
}

TEST(BfcRegionTest, TakesTheSmallestChunkThatFitsLowestAddressFirst) {
  const auto region = MakeRegion(8 * kMiB);
  // Holes of 3, 1 and 1 KiB, kept apart.
  void* const hole3 = region->Allocate(3072);
  void* const wall1 = region->Allocate(256);
  void* const hole1a = region->Allocate(1024);
  void* const wall2 = region->Allocate(256);
  void* const hole1b = region->Allocate(1024);
  void* const wall3 = region->Allocate(256);
  region->Free(hole1b);
  region->Free(hole3);
  region->Free(hole1a);
  EXPECT_CONSISTENT(region);
  EXPECT_EQ(region->Allocate(700), hole1a);
  EXPECT_EQ(region->Allocate(1024), hole1b);
  EXPECT_EQ(region->Allocate(1025), hole3);
  EXPECT_CONSISTENT(region);
  for (void* ptr : {hole1a, hole1b, hole3, wall1, wall2, wall3}) region->Free(ptr);
  EXPECT_EQ(region->Stats().largest_free_bytes, 8 * kMiB);
}

TEST(BfcRegionTest, FreeMergesWithBothNeighbours) {
  const auto region = MakeRegion(2 * kMiB);
  void* a = region->Allocate(512 << 10);
  void* b = region->Allocate(512 << 10);
  void* c = region->Allocate(512 << 10);
  void* d = region->Allocate(512 << 10);
  EXPECT_EQ(region->Allocate(1), nullptr);
  region->Free(a);
  region->Free(c);
  EXPECT_EQ(region->Stats().largest_free_bytes, 512 << 10) << "two holes, not adjacent";
  EXPECT_EQ(region->Allocate(513 << 10), nullptr)
      << "fragmented: 1 MiB free, no piece large enough";
  region->Free(b);
  EXPECT_EQ(region->Stats().largest_free_bytes, 1536 << 10);
  EXPECT_CONSISTENT(region);
  region->Free(d);
  EXPECT_EQ(region->Stats().largest_free_bytes, 2 * kMiB);
  EXPECT_CONSISTENT(region);
}

TEST(BfcRegionTest, ForeignAndDoubleFreesAreBrokenInvariants) {
  const auto region = MakeRegion(2 * kMiB);
  char local = 0;
  char* const ptr = static_cast<char*>(region->Allocate(1000));
  void* const other = region->Allocate(1000);
  EXPECT_THROW(region->Free(&local), InternalError);
  EXPECT_THROW(region->Free(ptr + 256), InternalError);
  region->Free(ptr);
  EXPECT_THROW(region->Free(ptr), InternalError);
  EXPECT_CONSISTENT(region);
  region->Free(other);
  EXPECT_THROW(region->Free(other), InternalError) << "merged into its neighbour";
  EXPECT_CONSISTENT(region);
}

TEST(BfcRegionTest, ReservingTouchesNoMemory) {
  const auto region = MakeRegion(int64_t{1} << 36);  // 64 GiB: more than the machine may have.
  void* const ptr = region->Allocate(size_t{1} << 35);
  ASSERT_NE(ptr, nullptr);
  EXPECT_EQ(ResidentBytes(*region), 0);
  region->Free(ptr);
  EXPECT_EQ(ResidentBytes(*region), 0);
}

TEST(BfcRegionTest, WithoutGrowthEverythingIsCommittedAtOnceAndStays) {
  const auto region = MakeRegion(64 * kMiB, /*grow=*/false);
  EXPECT_EQ(ResidentBytes(*region), 64 * kMiB);
  void* const ptr = region->Allocate(32 * kMiB);
  region->Free(ptr);
  EXPECT_EQ(ResidentBytes(*region), 64 * kMiB);
  EXPECT_CONSISTENT(region);
}

TEST(BfcRegionTest, FreedPagesGoBackToTheSystem) {
  const auto region = MakeRegion(256 * kMiB);
  // Unaligned pieces, so that adjacent pieces share their first and last pages.
  const size_t piece = 10 * kMiB + 256;
  std::vector<void*> live;
  for (int i = 0; i < 16; ++i) {
    live.push_back(region->Allocate(piece));
    std::memset(live.back(), 1, piece);
  }
  EXPECT_GE(ResidentBytes(*region), 160 * kMiB);
  for (size_t i = 0; i < live.size(); i += 2) region->Free(live[i]);
  // The 8 pieces in use, the two pages at the edges of each, and one huge page that reaches beyond
  // the last piece.
  EXPECT_LE(ResidentBytes(*region), 80 * kMiB + 16 * sysconf(_SC_PAGESIZE) + 2 * kMiB);
  for (size_t i = 1; i < live.size(); i += 2) region->Free(live[i]);
  EXPECT_EQ(ResidentBytes(*region), 0);
  EXPECT_CONSISTENT(region);
}

TEST(BfcRegionTest, ManySmallFreesGiveTheirPagesBackTogether) {
  const auto region = MakeRegion(128 * kMiB);
  std::vector<void*> live;
  for (int i = 0; i < 1000; ++i) {
    live.push_back(region->Allocate(64 << 10));
    std::memset(live.back(), 1, 64 << 10);
  }
  EXPECT_GE(ResidentBytes(*region), 62 * kMiB);
  std::shuffle(live.begin(), live.end(), std::mt19937(1));
  for (void* ptr : live) region->Free(ptr);
  EXPECT_LT(ResidentBytes(*region), kMiB) << "less than what a chunk may keep";
}

TEST(BfcRegionTest, MemoryIsIntactAfterNeighboursWereGivenBack) {
  const auto region = MakeRegion(64 * kMiB);
  const size_t piece = 3 * kMiB + 512;
  unsigned char* const a = static_cast<unsigned char*>(region->Allocate(piece));
  unsigned char* const b = static_cast<unsigned char*>(region->Allocate(piece));
  unsigned char* const c = static_cast<unsigned char*>(region->Allocate(piece));
  for (unsigned char* p : {a, b, c}) std::memset(p, 0x5a, piece);
  region->Free(a);
  region->Free(c);
  for (size_t i = 0; i < piece; ++i) ASSERT_EQ(b[i], 0x5a) << "byte " << i;
  region->Free(b);
}

TEST(BfcRegionTest, AddressSanitizerSeesFreedMemory) {
#ifdef AS_HAS_ASAN
  const auto region = MakeRegion(8 * kMiB);
  char* const ptr = static_cast<char*>(region->Allocate(1000));
  EXPECT_EQ(__asan_region_is_poisoned(ptr, 1000), nullptr);
  region->Free(ptr);
  EXPECT_TRUE(__asan_address_is_poisoned(ptr));
  EXPECT_TRUE(__asan_address_is_poisoned(ptr + 999));
  char* const larger = static_cast<char*>(region->Allocate(5000));
  ASSERT_EQ(larger, ptr);
  EXPECT_EQ(__asan_region_is_poisoned(ptr, 5000), nullptr);
  region->Free(larger);
#else
  GTEST_SKIP() << "not built with AddressSanitizer";
#endif
}

// The allocator's own bookkeeping is on the heap: each of its allocations fails once.
TEST(BfcRegionTest, NoRoomForTheBooksGivesNullAndChangesNothing) {
  if (!testing::CanInjectFailures()) GTEST_SKIP() << "a sanitizer owns malloc";
  const auto region = MakeRegion(8 * kMiB);
  void* const first = region->Allocate(1000);
  int64_t failures = 0;
  for (int64_t n = 1; n < 20; ++n) {
    const AllocatorStats before = region->Stats();
    testing::HeapFaults faults;
    faults.FailNth(n);
    faults.Enter();
    void* const ptr = region->Allocate(5000);
    faults.Leave();
    EXPECT_CONSISTENT(region);
    if (ptr != nullptr) {
      region->Free(ptr);
      break;
    }
    ++failures;
    EXPECT_EQ(region->Stats().num_live, before.num_live);
    EXPECT_EQ(region->Stats().bytes_in_use, before.bytes_in_use);
    EXPECT_EQ(region->Stats().num_allocs, before.num_allocs);
  }
  EXPECT_GT(failures, 0);
  region->Free(first);
}

TEST(BfcRegionTest, FreeAllocatesNothing) {
  const auto region = MakeRegion(8 * kMiB);
  std::vector<void*> live;
  for (int i = 0; i < 100; ++i) live.push_back(region->Allocate(3000));
  std::shuffle(live.begin(), live.end(), std::mt19937(2));
  testing::AllocationCounter counter;
  {
    const testing::AllocationCounter::Scope scope(&counter);
    for (void* ptr : live) region->Free(ptr);
  }
  EXPECT_EQ(counter.count(), 0);
}

// A model of best fit: used intervals by offset; the free gaps follow from them.
class Model {
 public:
  explicit Model(int64_t bytes) : bytes_(bytes) {}

  // Offset, or -1.
  int64_t Allocate(int64_t size) {
    int64_t best = -1, best_gap = 0;
    int64_t end = 0;
    const auto look = [&](int64_t begin, int64_t limit) {
      const int64_t gap = limit - begin;
      if (gap >= size && (best < 0 || gap < best_gap)) best = begin, best_gap = gap;
    };
    for (const auto& [offset, used] : used_) {
      look(end, offset);
      end = offset + used;
    }
    look(end, bytes_);
    if (best >= 0) {
      used_[best] = size;
      in_use_ += size;
    }
    return best;
  }
  void Free(int64_t offset) {
    in_use_ -= used_.at(offset);
    used_.erase(offset);
  }
  int64_t in_use() const { return in_use_; }

 private:
  int64_t bytes_;
  int64_t in_use_ = 0;
  std::map<int64_t, int64_t> used_;
};

// 100,000 operations: every placement equals the model's, and contents are never overwritten.
TEST(BfcRegionTest, RandomScriptAgreesWithTheModel) {
  const int64_t bytes = 16 * kMiB;
  const auto region = MakeRegion(bytes);
  Model model(bytes);
  std::mt19937_64 random(20240607);
  struct Live {
    unsigned char* ptr;
    int64_t bytes, offset;
    unsigned char tag;
  };
  std::vector<Live> live;
  unsigned char* base = nullptr;
  int64_t num_allocs = 0, num_refused = 0;
  for (int step = 0; step < 100'000; ++step) {
    // Phases of growth and decline, so that both a full and a nearly empty region occur.
    const uint64_t percent_alloc = step / 5000 % 2 == 0 ? 58 : 42;
    if (live.empty() || random() % 100 < percent_alloc) {
      const int shift = static_cast<int>(random() % 20);
      const int64_t wanted = 1 + static_cast<int64_t>(random() % (uint64_t{1} << shift));
      const int64_t rounded = (wanted + kAlignment - 1) / kAlignment * kAlignment;
      auto* const ptr = static_cast<unsigned char*>(region->Allocate(static_cast<size_t>(wanted)));
      const int64_t offset = model.Allocate(rounded);
      ASSERT_EQ(ptr == nullptr, offset < 0) << "step " << step;
      if (ptr == nullptr) {
        ++num_refused;
        continue;
      }
      if (base == nullptr) base = ptr;
      ASSERT_EQ(ptr - base, offset) << "step " << step;
      ++num_allocs;
      const unsigned char tag = static_cast<unsigned char>(random());
      ptr[0] = ptr[wanted - 1] = tag;
      live.push_back({ptr, wanted, offset, tag});
    } else {
      const size_t pick = random() % live.size();
      const Live victim = live[pick];
      ASSERT_EQ(victim.ptr[0], victim.tag);
      ASSERT_EQ(victim.ptr[victim.bytes - 1], victim.tag);
      region->Free(victim.ptr);
      model.Free(victim.offset);
      live[pick] = live.back();
      live.pop_back();
    }
    if (step % 500 == 0) {
      const AllocatorStats stats = region->Stats();
      ASSERT_EQ(stats.bytes_in_use, model.in_use());
      ASSERT_EQ(stats.num_live, static_cast<int64_t>(live.size()));
      ASSERT_EQ(stats.num_allocs, num_allocs);
      ASSERT_TRUE(region->CheckConsistency().ok()) << region->CheckConsistency().ToString();
    }
  }
  EXPECT_GT(num_refused, 0) << "the script never filled the region";
  for (const Live& one : live) region->Free(one.ptr);
  EXPECT_EQ(region->Stats().largest_free_bytes, bytes);
  EXPECT_CONSISTENT(region);
}

TEST(BfcRegionTest, ThreadsMayShareIt) {
  const auto region = MakeRegion(64 * kMiB);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&region, t] {
      std::mt19937 random(t);
      std::vector<std::pair<unsigned char*, size_t>> live;
      for (int i = 0; i < 2000; ++i) {
        const size_t bytes = 1 + random() % 20000;
        auto* const ptr = static_cast<unsigned char*>(region->Allocate(bytes));
        if (ptr != nullptr) {
          std::memset(ptr, static_cast<int>(t), bytes);
          live.emplace_back(ptr, bytes);
        }
        if (live.size() > 50) {
          const size_t pick = random() % 50;
          for (size_t k = 0; k < live[pick].second; ++k) ASSERT_EQ(live[pick].first[k], t);
          region->Free(live[pick].first);
          live[pick] = live.back();
          live.pop_back();
        }
      }
      for (const auto& one : live) region->Free(one.first);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(region->Stats().num_live, 0);
  EXPECT_EQ(region->Stats().largest_free_bytes, 64 * kMiB);
  EXPECT_CONSISTENT(region);
}

}  // namespace
}  // namespace allspark
