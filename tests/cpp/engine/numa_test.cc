// CPU_NUMA: models whose threads, weights and cache lie on NUMA nodes give the bits of CPU:0. The
// nodes are made up of this machine's cores, so the system may refuse to bind memory to them.
#include "cpp/engine/engine_harness.h"
#include "platform/affinity.h"
#include "support/numa_folder.h"

namespace allspark::testing {
namespace {

class NumaTest : public EngineTest {
 protected:
  // Node 2 has this machine's first core, node 5 the second.
  void MakeTwoNodes() {
    folder_.Write("2,5", {{2, std::to_string(cores_[0])}, {5, std::to_string(cores_[1])}});
    // Cores that the process has besides are of no node, so they must not be there.
    ASSERT_TRUE(PinThread(pthread_self(), {cores_[0], cores_[1]}));
    TestingAccess::SetNumaDirectory(*engine_, folder_.path());
  }
  ~NumaTest() override { PinThread(pthread_self(), cores_); }

  RuntimeConfig On(const std::string& unit, const std::string& name) const {
    RuntimeConfig config = SmallConfig(name);
    config.compute_unit = unit;
    return config;
  }
  std::string InstallError(const RuntimeConfig& config) {
    EXPECT_OK(engine_->RegisterImage(config.model_name, MakeRandomModel(TinyLlamaSpec(), 1)));
    const Status status = engine_->InstallModel(config);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  }

  const std::vector<int> cores_ = AffinityCores();
  NumaFolder folder_;
};

TEST_F(NumaTest, ModelsGiveTheSameTokensOnNodes) {
  if (cores_.size() < 2) GTEST_SKIP() << "one core only";
  MakeTwoNodes();
  proto::DecoderSpec spec = TinyLlamaSpec(proto::COMPUTE_BFLOAT16);
  for (const CacheMode mode : {CacheMode::kDefault, CacheMode::kQuantI8, CacheMode::kQuantU4}) {
    for (const auto& [unit, name] : {std::pair{"CPU:0", "whole"}, std::pair{"CPU_NUMA", "nodes"},
                                     std::pair{"CPU_NUMA:5", "one"}}) {
      RuntimeConfig config = On(unit, name);
      config.cache_mode = mode;
      config.num_threads = 0;
      InstallAndStart(config, spec);
    }
    for (int i = 0; i < 6; ++i) {
      const Ids prompt = RandomPrompt(rng_, 1 + 17 * i, vocab_size_);
      const Ids expected = Run(prompt, Greedy(12), "whole");
      EXPECT_EQ(Run(prompt, Greedy(12), "nodes"), expected);
      EXPECT_EQ(Run(prompt, Greedy(12), "one"), expected);
    }
    // Copies are given back and made anew.
    ASSERT_OK(engine_->UnloadDeviceMemory("nodes"));
    ASSERT_OK(engine_->LoadDeviceMemory("nodes"));
    EXPECT_EQ(Run({1, 2, 3}, Greedy(12), "nodes"), Run({1, 2, 3}, Greedy(12), "whole"));
    for (const char* name : {"whole", "nodes", "one"}) {
      ASSERT_OK(engine_->StopModel(name));
      ASSERT_OK(engine_->ReleaseModel(name));
    }
  }
  EXPECT_EQ(TestingAccess::DeviceStats(*engine_).bytes_in_use, 0);
}

TEST_F(NumaTest, CopiesOfWeightsAreOfTheDevicesMemory) {
  if (cores_.size() < 2) GTEST_SKIP() << "one core only";
  MakeTwoNodes();
  TestingAccess::SetDeviceMaker(*engine_, [](CpuDevice::Parts parts) {
    return std::shared_ptr<Device>(std::make_shared<CpuDevice>(std::move(parts)));
  });
  const auto bytes_on = [&](const char* unit, int64_t* weight_bytes) {
    InstallAndStart(On(unit, "m"));
    *weight_bytes = engine_->GetModelInfo("m")->weight_bytes;
    const int64_t bytes = TestingAccess::DeviceStats(*engine_).bytes_in_use;
    EXPECT_OK(engine_->StopModel("m"));
    EXPECT_OK(engine_->ReleaseModel("m"));
    return bytes;
  };
  int64_t weight_bytes = 0;
  const int64_t whole = bytes_on("CPU:0", &weight_bytes);
  const int64_t copies = bytes_on("CPU_NUMA", &weight_bytes) - whole;
  EXPECT_GE(copies, weight_bytes * 9 / 10);  // All but tables that the host alone reads.
}

TEST_F(NumaTest, RefusesNodesAndThreadsThatAreNotThere) {
  if (cores_.size() < 2) GTEST_SKIP() << "one core only";
  MakeTwoNodes();
  EXPECT_EQ(InstallError(On("CPU_NUMA:2,3", "m")),
            "compute_unit is 'CPU_NUMA:2,3'; its ids must be of NUMA nodes of which this process "
            "has cores: 2, 5");
  RuntimeConfig config = On("CPU_NUMA", "m");
  config.num_threads = 3;
  EXPECT_EQ(InstallError(config),
            "num_threads is 3; with CPU_NUMA it must be at most 2, the cores of its nodes");
  config.compute_unit = "CPU_NUMA:5";
  config.num_threads = 2;
  EXPECT_EQ(InstallError(config),
            "num_threads is 2; with CPU_NUMA:5 it must be at most 1, the cores of its nodes");
}

TEST_F(NumaTest, OneNodeIsTheWholeCpu) {
  TestingAccess::SetNumaDirectory(*engine_, folder_.path());  // It says nothing of nodes.
  RuntimeConfig config = On("CPU_NUMA:0", "m");
  config.num_threads = static_cast<int64_t>(cores_.size()) + 1;
  InstallAndStart(config);
  EXPECT_EQ(Run({1, 2, 3}, Greedy(4)).size(), 4u);
  EXPECT_EQ(InstallError(On("CPU_NUMA:1", "n")),
            "compute_unit is 'CPU_NUMA:1'; its ids must be of NUMA nodes of which this process has "
            "cores: 0");
}

TEST_F(NumaTest, ThisMachinesNodesAreFound) {
  RuntimeConfig config = On("CPU_NUMA", "m");
  config.num_threads = 0;
  InstallAndStart(config);
  EXPECT_EQ(Run({1, 2, 3}, Greedy(4)).size(), 4u);
}

}  // namespace
}  // namespace allspark::testing
