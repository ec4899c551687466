#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "support/constants.h"
#include "support/process_usage.h"
#include "weights/file_io.h"

namespace allspark::weights {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

// Limits the process to 64 MiB of further mappings.
void LimitAddressSpace() {
  const auto limit =
      static_cast<rlim_t>(testing::ReadMemoryUsage().mapped_bytes + 64 * testing::kMiB);
  const struct rlimit limits = {limit, RLIM_INFINITY};
  EXPECT_EQ(setrlimit(RLIMIT_AS, &limits), 0);
}

// Prints the errors of mapping the file and 1 GiB of anonymous memory in too little address space,
// and ends the process.
[[noreturn]] void MapInLittleSpace(const std::string& path) {
  const Result<OpenedFile> file = OpenRegularFile(path);
  LimitAddressSpace();
  fprintf(stderr, "%s\n", Mapping::File(*file, path).status().ToString().c_str());
  fprintf(stderr, "%s\n", Mapping::Anonymous(kGiB).status().ToString().c_str());
  _exit(0);
}

TEST(MappingDeathTest, TheLimitOfAddressSpaceIsNamed) {
  const std::string path = ::testing::TempDir() + "mapping_test_" + std::to_string(getpid());
  std::ofstream(path).put('x');
  ASSERT_EQ(truncate(path.c_str(), kGiB), 0);
  const std::string limit =
      "the limit of address space \\(ulimit -v\\) is [0-9]+ bytes, of which [0-9]+ are taken";
  EXPECT_EXIT(
      MapInLittleSpace(path), ::testing::ExitedWithCode(0),
      "RESOURCE_EXHAUSTED: cannot map " + path + ": Cannot allocate memory; " + limit +
          "; the memory region of an engine takes less with a lower BFC_MEM_RATIO\n"
          "RESOURCE_EXHAUSTED: a memory image of 1073741824 bytes does not fit: [0-9]+ bytes "
          "of memory are available: " +
          limit);
  unlink(path.c_str());
}

}  // namespace
}  // namespace allspark::weights
