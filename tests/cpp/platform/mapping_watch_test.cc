#include "platform/mapping_watch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "support/sanitized.h"

#if AS_SANITIZED
// Each thread that reads a missing page maps it anew, under the eyes of the others: all find zeros.
// ThreadSanitizer takes a mapping for a write.
extern "C" const char* __tsan_default_suppressions() {
  return "race:allspark::MappingSlots::OnSignal\n";
}
#endif

namespace allspark {
namespace {

constexpr size_t kBytes = size_t{1} << 20;

// A file of ones, mapped for reading.
class MappedOnes {
 public:
  MappedOnes() {
    std::string path = ::testing::TempDir() + "/mapping_watch_XXXXXX";
    fd_ = mkstemp(path.data());
    unlink(path.c_str());
    const std::vector<unsigned char> ones(kBytes, 1);
    EXPECT_EQ(write(fd_, ones.data(), kBytes), static_cast<ssize_t>(kBytes));
    data_ = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd_, 0);
    EXPECT_NE(data_, MAP_FAILED);
  }
  ~MappedOnes() {
    munmap(data_, kBytes);
    close(fd_);
  }
  MappedOnes(const MappedOnes&) = delete;
  MappedOnes& operator=(const MappedOnes&) = delete;

  const void* data() const { return data_; }
  int At(size_t offset) const { return static_cast<const volatile unsigned char*>(data_)[offset]; }
  size_t Sum() const {
    size_t sum = 0;
    for (size_t i = 0; i < kBytes; ++i) sum += static_cast<size_t>(At(i));
    return sum;
  }
  void Truncate(size_t bytes) const { EXPECT_EQ(ftruncate(fd_, static_cast<off_t>(bytes)), 0); }

 private:
  int fd_ = -1;
  void* data_ = nullptr;
};

TEST(MappingWatchTest, WhatIsMissingReadsAsZeros) {
  const MappedOnes file, other;
  const MappingWatch watch(file.data(), kBytes), other_watch(other.data(), kBytes);
  EXPECT_EQ(file.Sum(), kBytes);
  file.Truncate(4096 * 3 + 5);
  EXPECT_FALSE(watch.IsBroken()) << "nothing was read yet";
  EXPECT_EQ(file.At(kBytes - 1), 0);
  EXPECT_TRUE(watch.IsBroken());
  // The system fills the file's last page with zeros.
  EXPECT_EQ(file.Sum(), 4096u * 3 + 5);
  EXPECT_EQ(other.Sum(), kBytes);
  EXPECT_FALSE(other_watch.IsBroken());
}

TEST(MappingWatchTest, EveryThreadThatReadsIsServed) {
  const MappedOnes file;
  const MappingWatch watch(file.data(), kBytes);
  file.Truncate(0);
  std::vector<size_t> sums(8, kBytes);
  std::vector<std::thread> threads;
  for (size_t& sum : sums) threads.emplace_back([&] { sum = file.Sum(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::count(sums.begin(), sums.end(), size_t{0}), 8);
  EXPECT_TRUE(watch.IsBroken());
}

TEST(MappingWatchTest, ABrokenMappingLeavesTheNextOneWhole) {
  for (int i = 0; i < 3; ++i) {
    const MappedOnes file;
    MappingWatch watch(file.data(), kBytes);
    EXPECT_FALSE(watch.IsBroken());
    file.Truncate(0);
    EXPECT_EQ(file.Sum(), 0u);
    const MappingWatch moved = std::move(watch);
    EXPECT_TRUE(moved.IsBroken());
    EXPECT_FALSE(watch.IsBroken())
        << "it is a watch of nothing";  // NOLINT(bugprone-use-after-move)
  }
}

// Runs in a process of its own, since the earlier signal handler is read only once.
class MappingWatchDeathTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

// Reads the removed part of an unwatched mapping while another mapping is watched.
void ReadUnwatched() {
  const MappedOnes watched, file;
  const MappingWatch watch(watched.data(), kBytes);
  file.Truncate(0);
  file.At(0);
}

bool IsFailure(int status) { return !WIFEXITED(status) || WEXITSTATUS(status) != 0; }

TEST_F(MappingWatchDeathTest, AnotherMappingStillEndsTheProcess) {
  EXPECT_EXIT(ReadUnwatched(), IsFailure, "");
}

TEST_F(MappingWatchDeathTest, AMappingIsNoLongerWatchedAfterwards) {
  EXPECT_EXIT(
      {
        const MappedOnes file;
        { const MappingWatch watch(file.data(), kBytes); }
        file.Truncate(0);
        file.At(0);
      },
      IsFailure, "");
}

TEST_F(MappingWatchDeathTest, ASignalThatSomebodySendsEndsTheProcess) {
  EXPECT_EXIT(
      {
        const MappedOnes file;
        const MappingWatch watch(file.data(), kBytes);
        raise(SIGBUS);
      },
      IsFailure, "");
}

TEST_F(MappingWatchDeathTest, TheHandlerBeforeHasTheRest) {
  EXPECT_EXIT(
      {
        signal(SIGBUS, [](int) { _exit(42); });
        ReadUnwatched();
      },
      ::testing::ExitedWithCode(42), "");
  EXPECT_EXIT(
      {
        struct sigaction action {};
        action.sa_flags = SA_SIGINFO;
        action.sa_sigaction = [](int, siginfo_t* info, void*) {
          _exit(info->si_code == BUS_ADRERR ? 43 : 1);
        };
        sigaction(SIGBUS, &action, nullptr);
        ReadUnwatched();
      },
      ::testing::ExitedWithCode(43), "");
}

}  // namespace
}  // namespace allspark
