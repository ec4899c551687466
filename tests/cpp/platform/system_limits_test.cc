#include "platform/system_limits.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/constants.h"
#include "support/temp_dir.h"

namespace allspark {
namespace {

using testing::kMiB;
constexpr int64_t kGiB = int64_t{1} << 30;

// A root folder with a /proc and cgroup trees of the test's making.
class SystemLimitsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Write(
        "proc/meminfo",
        "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n");
  }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path full = root_ / path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  void MountV2(const std::string& root = "/") {
    Write("proc/self/mountinfo",
          "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
          "30 22 0:26 " +
              root + " /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  void MountV1() {
    Write("proc/self/mountinfo",
          "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
          "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
          "36 31 0:33 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n");
  }
  SystemLimits Read() const { return ReadSystemLimits(root_.path()); }

  const testing::TempDir root_;
};

TEST_F(SystemLimitsTest, WithoutCgroupsTheMachineIsTheLimit) {
  const SystemLimits limits = Read();
  EXPECT_EQ(limits.memory_total.bytes, 16 * kGiB);
  EXPECT_EQ(limits.memory_available.bytes, 8 * kGiB);
  EXPECT_FALSE(limits.cpu_quota.has_value());
}

TEST_F(SystemLimitsTest, AnUnreadableProcStillGivesAMachine) {
  const SystemLimits limits = ReadSystemLimits(root_ / "missing");
  EXPECT_GT(limits.memory_total.bytes, 0);
  EXPECT_GT(limits.memory_available.bytes, 0);
}

TEST_F(SystemLimitsTest, V2TakesTheTightestLevel) {
  MountV2();
  Write("proc/self/cgroup", "0::/kube/pod/box\n");
  Write("sys/fs/cgroup/kube/memory.max", "4294967296\n");
  Write("sys/fs/cgroup/kube/memory.current", "4026531840\n");
  Write("sys/fs/cgroup/kube/pod/memory.max", "max\n");
  Write("sys/fs/cgroup/kube/pod/box/memory.max", "2147483648\n");
  Write("sys/fs/cgroup/kube/pod/box/memory.current", "1073741824\n");
  Write("sys/fs/cgroup/kube/cpu.max", "250000 100000\n");
  Write("sys/fs/cgroup/kube/pod/cpu.max", "max 100000\n");
  Write("sys/fs/cgroup/kube/pod/box/cpu.max", "400000 100000\n");
  const SystemLimits limits = Read();
  EXPECT_EQ(limits.memory_total.bytes, 2 * kGiB) << "the leaf's";
  EXPECT_EQ(limits.memory_available.bytes, 256 * kMiB) << "the parent is nearly full";
  EXPECT_EQ(limits.cpu_quota, 2.5);
}

TEST_F(SystemLimitsTest, FileCacheThatCanBeDroppedIsAvailable) {
  MountV2();
  Write("proc/self/cgroup", "0::/box\n");
  Write("sys/fs/cgroup/box/memory.max", "2147483648\n");
  Write("sys/fs/cgroup/box/memory.current", "2147483648\n");
  Write("sys/fs/cgroup/box/memory.stat",
        "anon 1\nfile 2\nactive_file 1\ninactive_file 1073741824\ninactive_file_other 5\n");
  EXPECT_EQ(Read().memory_available.bytes, kGiB);
}

TEST_F(SystemLimitsTest, MemoryHighIsALimitToo) {
  MountV2();
  Write("proc/self/cgroup", "0::/box\n");
  Write("sys/fs/cgroup/box/memory.max", "max\n");
  Write("sys/fs/cgroup/box/memory.high", "1073741824\n");
  Write("sys/fs/cgroup/box/memory.current", "2073741824\n");
  EXPECT_EQ(Read().memory_total.bytes, kGiB);
  EXPECT_EQ(Read().memory_available.bytes, 0) << "beyond it already";
}

TEST_F(SystemLimitsTest, V1) {
  MountV1();
  Write("proc/self/cgroup", "9:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n3:cpuset:/x\n0::/y\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes", "3221225472\n");
  Write("sys/fs/cgroup/memory/docker/a/memory.usage_in_bytes", "2147483648\n");
  Write("sys/fs/cgroup/memory/docker/a/memory.stat",
        "inactive_file 7\ntotal_inactive_file 1048576\n");
  Write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  Write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  Write("sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us", "150000\n");
  Write("sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_period_us", "100000\n");
  const SystemLimits limits = Read();
  EXPECT_EQ(limits.memory_total.bytes, 3 * kGiB);
  EXPECT_EQ(limits.memory_available.bytes, kGiB + kMiB);
  EXPECT_EQ(limits.cpu_quota, 1.5);
}

TEST_F(SystemLimitsTest, AContainersMountShowsItsOwnGroupAtTheTop) {
  Write("proc/self/mountinfo",
        "35 31 0:32 /docker/a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "3221225472\n");
  Write("sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "1073741824\n");
  Write("proc/self/cgroup", "9:memory:/docker/a\n");
  EXPECT_EQ(Read().memory_total.bytes, 3 * kGiB);
  Write("proc/self/cgroup", "9:memory:/docker/a/inner\n");
  EXPECT_EQ(Read().memory_total.bytes, kGiB);
  Write("proc/self/cgroup", "9:memory:/docker/ab/inner\n");
  EXPECT_EQ(Read().memory_total.bytes, 3 * kGiB) << "elsewhere: only the mount's top is known";
}

TEST_F(SystemLimitsTest, APathOutsideOfTheNamespaceCountsAsTheTop) {
  MountV2();
  Write("proc/self/cgroup", "0::/../../other\n");
  Write("sys/fs/cgroup/memory.max", "1073741824\n");
  EXPECT_EQ(Read().memory_total.bytes, kGiB);
}

TEST_F(SystemLimitsTest, MountPointsMayHoldBlanks) {
  Write("proc/self/mountinfo", "30 22 0:26 / /my\\040cgroups rw - cgroup2 none rw\n");
  Write("proc/self/cgroup", "0::/box\n");
  Write("my cgroups/box/memory.max", "1073741824\n");
  EXPECT_EQ(Read().memory_total.bytes, kGiB);
}

TEST_F(SystemLimitsTest, NonsenseDoesNotLimit) {
  MountV2();
  Write("proc/self/cgroup", "no colons\n0:\n0::/box\n");
  Write("sys/fs/cgroup/box/memory.max", "lots\n");
  Write("sys/fs/cgroup/box/cpu.max", "\n");
  Write("sys/fs/cgroup/cpu.max", "100000 0\n");
  const SystemLimits limits = Read();
  EXPECT_EQ(limits.memory_total.bytes, 16 * kGiB);
  EXPECT_FALSE(limits.cpu_quota.has_value());
}

TEST_F(SystemLimitsTest, ALimitAboveTheMachineDoesNotBind) {
  MountV2();
  Write("proc/self/cgroup", "0::/box\n");
  Write("sys/fs/cgroup/box/memory.max", "99999999999999999999999\n");
  Write("sys/fs/cgroup/box/memory.current", "5\n");
  EXPECT_EQ(Read().memory_total.bytes, 16 * kGiB);
  EXPECT_EQ(Read().memory_available.bytes, 8 * kGiB);
}

constexpr const char* kNoProcessLimits =
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max data size             unlimited            unlimited            bytes     \n"
    "Max address space         unlimited            unlimited            bytes     \n";

TEST_F(SystemLimitsTest, AddressSpaceIsWhatItsLimitLeaves) {
  Write("proc/self/limits", kNoProcessLimits);
  Write("proc/self/status", "Name:\tx\nVmSize:\t 1048576 kB\nVmData:\t  524288 kB\n");
  EXPECT_EQ(Read().memory_total.bytes, 16 * kGiB);
  Write("proc/self/limits",
        "Max data size             unlimited            unlimited            bytes     \n"
        "Max address space         4294967296           unlimited            bytes     \n");
  const SystemLimits limits = Read();
  EXPECT_EQ(limits.memory_total.bytes, 3 * kGiB);
  EXPECT_EQ(limits.memory_available.bytes, 3 * kGiB);
  EXPECT_EQ(limits.memory_for_reserved.bytes, 8 * kGiB) << "its addresses are taken already";
  EXPECT_EQ(limits.memory_total.source,
            "the limit of address space (ulimit -v) is 4294967296 bytes, of which 1073741824 are "
            "taken");
  EXPECT_EQ(limits.memory_available.source, limits.memory_total.source);
  Write("proc/self/limits",
        "Max address space         1048576              4                bytes\n");
  EXPECT_EQ(Read().memory_total.bytes, 0) << "it was lowered below what is mapped";
}

TEST_F(SystemLimitsTest, DataIsWhatItsLimitLeaves) {
  Write("proc/self/limits",
        "Max data size             2147483648           2147483648           bytes     \n"
        "Max address space         unlimited            unlimited            bytes     \n");
  Write("proc/self/status", "VmSize:\t 9999999 kB\nVmData:\t 1048576 kB\n");
  const SystemLimits limits = Read();
  for (const MemoryBound& bound :
       {limits.memory_total, limits.memory_available, limits.memory_for_reserved}) {
    EXPECT_EQ(bound.bytes, kGiB);
    EXPECT_EQ(bound.source,
              "the limit of data (ulimit -d) is 2147483648 bytes, of which 1073741824 are taken");
  }
}

TEST_F(SystemLimitsTest, TheLeastOfAllLimitsIsNamed) {
  EXPECT_EQ(Read().memory_total.source, "the machine has 17179869184 bytes of memory");
  EXPECT_EQ(Read().memory_available.source, "the machine has 8589934592 bytes of memory available");
  MountV2();
  Write("proc/self/cgroup", "0::/kube/box\n");
  Write("sys/fs/cgroup/kube/memory.max", "4294967296\n");
  Write("sys/fs/cgroup/kube/memory.current", "1073741824\n");
  Write("sys/fs/cgroup/kube/box/memory.max", "max\n");
  Write("sys/fs/cgroup/kube/box/memory.high", "6442450944\n");
  const std::string source = root_ / "sys/fs/cgroup/kube/memory.max is 4294967296 bytes";
  EXPECT_EQ(Read().memory_total.source, source);
  EXPECT_EQ(Read().memory_available.source, source + ", of which 1073741824 are taken");
  Write("proc/self/limits", "Max address space         5368709120           unlimited   bytes\n");
  Write("proc/self/status", "VmSize:\t 3145728 kB\n");
  EXPECT_EQ(Read().memory_total.bytes, 2 * kGiB);
  EXPECT_TRUE(Read().memory_total.source.starts_with("the limit of address space"));
  Write("proc/self/status", "VmSize:\t 0 kB\n");
  EXPECT_EQ(Read().memory_total.source, source);
  EXPECT_EQ(Read().memory_available.bytes, 3 * kGiB);
}

TEST(CpuCountFromTest, QuotaRoundsDownToAtLeastOne) {
  EXPECT_EQ(CpuCountFrom(8, std::nullopt), 8);
  EXPECT_EQ(CpuCountFrom(8, 100.0), 8);
  EXPECT_EQ(CpuCountFrom(8, 4.0), 4);
  EXPECT_EQ(CpuCountFrom(8, 2.5), 2);
  EXPECT_EQ(CpuCountFrom(8, 0.5), 1);
  EXPECT_EQ(CpuCountFrom(0, std::nullopt), 1);
}

TEST(MemoryBytesTest, ThisMachineHasMemory) {
  EXPECT_GT(TotalMemory().bytes, 0);
  EXPECT_GT(AvailableMemory().bytes, 0);
  EXPECT_LE(AvailableMemory().bytes, TotalMemory().bytes);
}

}  // namespace
}  // namespace allspark
