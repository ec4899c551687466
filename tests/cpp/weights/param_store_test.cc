#include "weights/param_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>
#include <string>

#include "support/temp_dir.h"
#include "weights/file_io.h"

namespace allspark::weights {
namespace {

constexpr int64_t kFileBytes = 4 * kHugePageBytes + 12345;

// Bytes that this process has mapped of the file in huge pages.
int64_t HugeBytes(const std::string& path) {
  std::ifstream smaps("/proc/self/smaps");
  bool is_of_file = false;
  int64_t bytes = 0;
  for (std::string line; std::getline(smaps, line);) {
    std::istringstream words(line);
    std::string key;
    int64_t kilobytes = 0;
    words >> key >> kilobytes;
    if (key.back() != ':') is_of_file = line.ends_with(path);
    if (is_of_file && key == "FilePmdMapped:") bytes += 1024 * kilobytes;
  }
  return bytes;
}

int64_t HugeBytesOfMapping(const std::string& path) {
  const Result<OpenedFile> file = OpenRegularFile(path);
  EXPECT_TRUE(file.ok());
  const Result<Mapping> mapping = Mapping::File(*file, path);
  EXPECT_TRUE(mapping.ok());
  EXPECT_TRUE(mapping->Populate(0, mapping->bytes()));
  return HugeBytes(path);
}

std::string Contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

class ParamStoreTest : public ::testing::Test {
 protected:
  // Writes all but one gap of `bytes` in small pieces, the last piece first.
  void WriteBackwards(const std::string& bytes, int64_t gap_begin, int64_t gap_end) {
    constexpr int64_t kPiece = 50000;
    Result<std::unique_ptr<ParamStore>> store =
        CreateFileStore(base_ + ".graph", base_ + ".param", kFileBytes);
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    for (int64_t end = kFileBytes; end > 0; end -= kPiece) {
      const int64_t begin = std::max<int64_t>(0, end - kPiece);
      if (begin < gap_end && end > gap_begin) continue;
      const Status written = (*store)->Write(begin, bytes.data() + begin, end - begin);
      ASSERT_TRUE(written.ok()) << written.ToString();
    }
    ASSERT_TRUE((*store)->Finish("graph").ok());
  }

  const testing::TempDir dir_;
  const std::string base_ = dir_ / "model";
};

TEST_F(ParamStoreTest, WhatIsNotWrittenIsZero) {
  const int64_t gap_begin = kHugePageBytes / 2;
  const int64_t gap_end = 3 * kHugePageBytes;
  WriteBackwards(std::string(kFileBytes, 'x'), gap_begin, gap_end);
  const std::string found = Contents(base_ + ".param");
  ASSERT_EQ(static_cast<int64_t>(found.size()), kFileBytes);
  for (int64_t i = gap_begin; i < gap_end; ++i) ASSERT_EQ(found[static_cast<size_t>(i)], '\0');
  EXPECT_EQ(found.front(), 'x');
  EXPECT_EQ(found.back(), 'x');
  EXPECT_EQ(Contents(base_ + ".graph"), "graph");
}

TEST_F(ParamStoreTest, AFileWrittenInPiecesIsMappedInHugePages) {
  std::string bytes(kFileBytes, '\0');
  std::mt19937 random(1);
  for (char& byte : bytes) byte = static_cast<char>(random());
  const std::string whole = base_ + ".whole";
  std::ofstream(whole, std::ios::binary).write(bytes.data(), kFileBytes);
  WriteBackwards(bytes, 0, 0);
  EXPECT_EQ(Contents(base_ + ".param"), bytes);
  if (HugeBytesOfMapping(whole) < 4 * kHugePageBytes) {
    GTEST_SKIP() << "the system does not cache " << whole << " in huge pages";
  }
  EXPECT_GT(HugeBytesOfMapping(base_ + ".param"), 0);
}

}  // namespace
}  // namespace allspark::weights
