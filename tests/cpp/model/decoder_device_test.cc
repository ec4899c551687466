// A decoder on a device whose memory the host cannot touch and whose operations run late gives the
// bits that it gives on the CPU: every family, quantised weights and caches, adapters, and what is
// asked for besides logits.
#include <gtest/gtest.h>

#include "base/check.h"
#include "cpp/model/decoder_harness.h"
#include "model/lora.h"
#include "support/random_lora.h"

namespace allspark {
namespace {

using testing::DecoderHarness;
using testing::HarnessOptions;
using testing::RandomTokens;
using testing::SimDevice;
using testing::SimOps;

class DecoderDeviceTest
    : public ::testing::TestWithParam<std::tuple<testing::TinySpecMaker, proto::ComputeType>> {
 protected:
  DecoderDeviceTest()
      : spec_(std::get<0>(GetParam())(std::get<1>(GetParam()))),
        reader_(testing::OpenRandomModel(spec_, 3)) {}

  // All that a few steps give: chunks, decodes beside them, logits, states and embeddings.
  std::vector<std::vector<float>> Outputs(bool on_sim, CacheMode cache_mode, bool adapted) {
    HarnessOptions options;
    options.table = kernels::DefaultTable();
    options.num_threads = 2;
    options.cache_mode = cache_mode;
    options.on_sim = on_sim;
    options.lora_max_rank = adapted ? 8 : 0;
    DecoderHarness harness(*reader_, options);
    std::shared_ptr<const LoraAdapter> adapter;
    if (adapted) {
      const auto shape = MakeDecoderShape(spec_, cache_mode);
      testing::RandomLora file(5);
      file.AddAll(spec_, 4);
      adapter = testing::Must(LoraAdapter::Create(file, *reader_, *shape, 8, harness.device()));
    }
    const int a = harness.Add(RandomTokens(70, spec_.vocab_size(), 1), adapter.get());
    const int b = harness.Add(RandomTokens(40, spec_.vocab_size(), 2));
    std::vector<std::vector<float>> outputs;
    const auto step = [&](const std::vector<DecoderHarness::Chunk>& chunks) {
      for (auto& row : harness.Step(chunks)) outputs.push_back(std::move(row));
      std::vector<float> hidden(static_cast<size_t>(harness.decoder().hidden_size()));
      harness.decoder().HiddenStates(0, 1, hidden.data());
      outputs.push_back(hidden);
      harness.decoder().InputEmbeddings(0, 1, hidden.data());
      outputs.push_back(hidden);
    };
    step({{a, 33, true}, {b, 17, true}});
    step({{b, 1, true}, {a, 36, false}});
    step({{a, 1, true}, {b, 1, true}});
    return outputs;
  }

  void ExpectSameBits(CacheMode cache_mode, bool adapted = false) {
    EXPECT_EQ(Outputs(true, cache_mode, adapted), Outputs(false, cache_mode, adapted));
  }

  proto::DecoderSpec spec_;
  std::unique_ptr<ModelReader> reader_;
};

TEST_P(DecoderDeviceTest, SameBitsAsTheCpu) { ExpectSameBits(CacheMode::kDefault); }
TEST_P(DecoderDeviceTest, SameBitsWithQuantisedCaches) {
  for (const CacheMode mode : {CacheMode::kQuantI8, CacheMode::kQuantU4, CacheMode::kQuantK8V4}) {
    ExpectSameBits(mode);
  }
}
TEST_P(DecoderDeviceTest, SameBitsWithAdapters) { ExpectSameBits(CacheMode::kDefault, true); }

INSTANTIATE_TEST_SUITE_P(
    All, DecoderDeviceTest,
    ::testing::Combine(::testing::ValuesIn(testing::TinySpecMakers()),
                       ::testing::Values(proto::COMPUTE_FLOAT32, proto::COMPUTE_BFLOAT16)),
    [](const auto& test) { return std::apply(testing::SpecName, test.param); });

// What catches a host that reads or writes a device's memory, and an operation that is given the
// host's.
class SimDeviceTest : public ::testing::Test {
 protected:
  ThreadPool pool_{1, false};
  SystemAllocator allocator_{int64_t{1} << 26};
  SimDevice device_{{std::shared_ptr<Allocator>(std::shared_ptr<void>(), &allocator_),
                     std::shared_ptr<ThreadPool>(std::shared_ptr<void>(), &pool_),
                     kernels::DefaultTable(), 0}};
};

using SimDeviceDeathTest = SimDeviceTest;

TEST_F(SimDeviceDeathTest, TheHostCannotTouchItsMemory) {
  auto buffer = Buffer::Create(device_.allocator(), 64);
  ASSERT_TRUE(buffer.ok());
  auto* const bytes = static_cast<volatile char*>(buffer->data());
  EXPECT_DEATH(bytes[3] = 1, "");
  EXPECT_DEATH(static_cast<void>(bytes[3]), "");
}

TEST_F(SimDeviceTest, OperationsRunWhenAResultIsAskedFor) {
  auto buffer = Buffer::Create(device_.allocator(), 64);
  ASSERT_TRUE(buffer.ok());
  auto* const x = static_cast<float*>(buffer->data());
  float values[16] = {1, 2, 3};
  SimOps& ops = device_.ops();
  ops.Upload(x, values, sizeof(values));
  values[0] = 7;  // Read already.
  const Matrix row{x, DType::kFloat32, 1, 16, 16};
  ops.Scale(row, {.scale = 2}, /*accumulate=*/false, row);
  EXPECT_EQ(ops.num_waiting(), 2u);
  ops.Download(values, x, sizeof(values));
  EXPECT_EQ(ops.num_waiting(), 0u);
  EXPECT_EQ(values[0], 2);
  EXPECT_EQ(values[2], 6);
}

TEST_F(SimDeviceTest, OperationsOnHostMemoryAreRefused) {
  auto buffer = Buffer::Create(device_.allocator(), 64);
  ASSERT_TRUE(buffer.ok());
  float host[16] = {};
  const Matrix there{buffer->data(), DType::kFloat32, 1, 16, 16};
  const Matrix here{host, DType::kFloat32, 1, 16, 16};
  EXPECT_THROW(device_.ops().Scale(here, {}, false, there), InternalError);
  EXPECT_THROW(device_.ops().Scale(there, {}, false, here), InternalError);
}

}  // namespace
}  // namespace allspark
