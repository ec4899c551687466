// A folder that tells of NUMA nodes as the kernel's does (platform/numa.h).
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

namespace allspark::testing {

class NumaFolder {
 public:
  NumaFolder() : path_(::testing::TempDir() + "/allspark_numa_XXXXXX") {
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  ~NumaFolder() { std::filesystem::remove_all(path_); }
  NumaFolder(const NumaFolder&) = delete;
  NumaFolder& operator=(const NumaFolder&) = delete;

  const std::string& path() const { return path_; }

  // Says that these nodes are there, such as "0-1", and which cores some have.
  void Write(const std::string& online,
             const std::vector<std::pair<int, std::string>>& core_lists) const {
    std::ofstream(path_ + "/online") << online << '\n';
    for (const auto& [node, list] : core_lists) {
      const std::string folder = path_ + "/node" + std::to_string(node);
      std::filesystem::create_directories(folder);
      std::ofstream(folder + "/cpulist") << list << '\n';
    }
  }

 private:
  std::string path_;
};

}  // namespace allspark::testing
