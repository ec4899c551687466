// The KV pool takes what a device has left beside everything else of a model.
#include "engine/model_sizes.h"

#include <gtest/gtest.h>

#include <string>

#include "memory/system_allocator.h"
#include "ops/cpu/cpu_device.h"
#include "support/random_model.h"

namespace allspark {
namespace {

class RoomDevice final : public CpuDevice {
 public:
  using CpuDevice::CpuDevice;
  DeviceRoom room() const override { return {bytes, bytes, "a test's"}; }
  bool has_own_memory() const override { return has_own; }

  int64_t bytes = 0;
  bool has_own = true;
};

class ModelSizesTest : public ::testing::Test {
 protected:
  ModelSizesTest() {
    config_.model_name = "m";
    config_.engine_max_length = 512;
    config_.engine_max_batch = 1024;  // so that memory is the bound
  }
  Result<ModelSizes> Measure() { return ModelSizes::Measure(config_, *reader_, nullptr, device_); }

  RuntimeConfig config_;
  ThreadPool pool_{1, false};
  SystemAllocator allocator_{int64_t{1} << 20};
  RoomDevice device_{allocator_, pool_, *kernels::DefaultTable()};
  std::unique_ptr<ModelReader> reader_ = testing::OpenRandomModel(testing::TinyLlamaSpec(), 1);
};

TEST_F(ModelSizesTest, TheDevicesCopiesOfWeightsAndItsStepsComeFirst) {
  device_.bytes = int64_t{256} << 20;
  const Result<ModelSizes> own = Measure();
  ASSERT_TRUE(own.ok()) << own.status().ToString();
  const ModelInfo& info = own->info;
  // Half of what is left, in whole extents.
  const int64_t left = device_.bytes - info.weight_bytes - info.work_bytes;
  EXPECT_LE(info.kv_pool_bytes, left / 2);
  EXPECT_GT(info.kv_pool_bytes, left / 2 - 17 * info.bytes_per_token * info.block_size);
  device_.has_own = false;  // The weights are mapped, and the system lends memory for steps.
  const Result<ModelSizes> shared = Measure();
  ASSERT_TRUE(shared.ok()) << shared.status().ToString();
  EXPECT_GT(shared->num_blocks, own->num_blocks);
}

TEST_F(ModelSizesTest, TheDepthWhereATokenCostsTwiceFollowsFromTheShape) {
  device_.bytes = int64_t{256} << 20;
  proto::DecoderSpec spec = testing::TinyLlamaSpec();
  const auto measure = [&] {
    reader_ = testing::OpenRandomModel(spec, 1);
    const Result<ModelSizes> sizes = Measure();
    EXPECT_TRUE(sizes.ok()) << sizes.status().ToString();
    return sizes.ok() ? sizes->double_cost_depth : -1;
  };
  const int64_t heads = (2 * spec.num_heads() + 2 * spec.num_kv_heads()) * spec.head_dim();
  const int64_t products = spec.hidden_size() * (heads + 3 * spec.intermediate_size());
  const int64_t depth = products / (2 * spec.num_heads() * spec.head_dim());
  EXPECT_EQ(measure(), depth);
  // Of layers with a window, attention does not grow.
  for (int64_t i = 0; i < spec.num_layers(); ++i) spec.add_layer_window(i == 0 ? 0 : 8);
  EXPECT_EQ(measure(), products * spec.num_layers() / (2 * spec.num_heads() * spec.head_dim()));
  spec.set_layer_window(0, 8);
  EXPECT_EQ(measure(), 0);
}

TEST_F(ModelSizesTest, ADeviceThatWeightsAndStepsFillIsRefused) {
  device_.bytes = int64_t{256} << 20;
  const Result<ModelSizes> fits = Measure();
  ASSERT_TRUE(fits.ok()) << fits.status().ToString();
  device_.bytes = fits->info.weight_bytes + fits->info.work_bytes;
  const Status status = Measure().status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  for (const std::string part : {"model 'm' takes ", "MiB of the device's memory for weights",
                                 "there is room for", "a test's"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.ToString();
  }
}

}  // namespace
}  // namespace allspark
