// A folder that tells of NUMA nodes as the kernel's does (platform/numa.h).
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "support/temp_dir.h"

namespace allspark::testing {

class NumaFolder {
 public:
  const std::string& path() const { return dir_.path(); }

  // Says that these nodes are there, such as "0-1", and which cores some have.
  void Write(const std::string& online,
             const std::vector<std::pair<int, std::string>>& core_lists) const {
    std::ofstream(dir_ / "online") << online << '\n';
    for (const auto& [node, list] : core_lists) {
      const std::string folder = dir_ / ("node" + std::to_string(node));
      std::filesystem::create_directories(folder);
      std::ofstream(folder + "/cpulist") << list << '\n';
    }
  }

 private:
  const TempDir dir_;
};

}  // namespace allspark::testing
