// The fuzz targets without a fuzzer: their seeds are as expected, earlier faults stay fixed, and
// some thousand changed seeds are refused or harmless.

#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "fuzz/lora_file_target.h"
#include "fuzz/model_reader_target.h"

namespace allspark::fuzz {
namespace {

struct Target {
  const char* name;
  bool (*run)(const uint8_t* data, size_t size);
  void (*write_seeds)(const std::string& folder);
  // num_opened: the seeds that open. The other seeds only exercise a refusal.
  size_t num_seeds, num_opened;
};

class FuzzReplayTest : public ::testing::TestWithParam<Target> {
 protected:
  void SetUp() override { google::protobuf::SetLogHandler(nullptr); }

  static std::vector<std::string> ReadFolder(const std::filesystem::path& folder) {
    std::vector<std::filesystem::path> paths;
    if (std::filesystem::exists(folder)) {
      std::copy(std::filesystem::directory_iterator(folder), {}, std::back_inserter(paths));
    }
    std::sort(paths.begin(), paths.end());
    std::vector<std::string> contents;
    for (const auto& path : paths) {
      std::ifstream file(path, std::ios::binary);
      contents.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return contents;
  }
  static std::vector<std::string> Seeds() {
    const std::filesystem::path folder = std::filesystem::path(ScratchFolder()) / GetParam().name;
    std::filesystem::create_directories(folder);
    GetParam().write_seeds(folder.string());
    return ReadFolder(folder);
  }
  static bool Run(const std::string& input) {
    return GetParam().run(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  }
};

TEST_P(FuzzReplayTest, SeedsAreWhatTheyShouldBe) {
  const std::vector<std::string> seeds = Seeds();
  EXPECT_EQ(seeds.size(), GetParam().num_seeds);
  EXPECT_EQ(static_cast<size_t>(std::count_if(seeds.begin(), seeds.end(), Run)),
            GetParam().num_opened);
}

// tests/fuzz/cases/NAME has every input with which a fuzzer ever found a fault.
TEST_P(FuzzReplayTest, CasesAreFaultsNoMore) {
  const auto here = std::filesystem::path(__FILE__).parent_path();
  std::filesystem::path cases = here / "../../fuzz/cases";
  if (!std::filesystem::exists(cases)) cases = "tests/fuzz/cases";  // a relative __FILE__
  ASSERT_TRUE(std::filesystem::exists(cases)) << cases;
  for (const std::string& input : ReadFolder(cases / GetParam().name)) (void)Run(input);
}

TEST_P(FuzzReplayTest, ChangedSeedsAreHarmless) {
  const std::vector<std::string> seeds = Seeds();
  std::mt19937 random(1);
  const auto below = [&](size_t end) { return static_cast<size_t>(random() % end); };
  size_t num_opened = 0;
  for (int i = 0; i < 5000; ++i) {
    std::string input = seeds[below(seeds.size())];
    for (size_t change = 1 + below(3); change > 0; --change) {
      const size_t place = below(input.size());
      switch (below(4)) {
        case 0:
          input[place] = static_cast<char>(input[place] ^ (1 << below(8)));
          break;
        case 1:
          input[place] = static_cast<char>(random());
          break;
        case 2:
          input.erase(place, 1 + below(8));
          break;
        default:
          input.insert(place, 1 + below(8), static_cast<char>(random()));
      }
      if (input.empty()) input = "x";
    }
    num_opened += Run(input);
  }
  // Some inputs open and some are refused.
  EXPECT_GT(num_opened, 100u);
  EXPECT_LT(num_opened, 4000u);
}

INSTANTIATE_TEST_SUITE_P(
    Targets, FuzzReplayTest,
    ::testing::Values(Target{"model_reader", model_reader::Run, model_reader::WriteSeeds, 48, 32},
                      Target{"lora_file", lora_file::Run, lora_file::WriteSeeds, 4, 4}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace allspark::fuzz
