// What a step asks of a device: each upload, download and operation costs a device behind a bus or
// a driver some microseconds, so their number is part of the design.
#include "cpp/engine/engine_harness.h"
#include "support/counting_device.h"

namespace allspark {
namespace {

using testing::CountingDevice;
using testing::CountingOps;
using testing::EngineTest;
using testing::Greedy;
using testing::HookGuard;
using testing::Ids;
using testing::RandomPrompt;
using testing::ReadAll;
using testing::SmallConfig;

constexpr int64_t kBatch = 64;

class DeviceTrafficTest : public EngineTest {
 protected:
  // The counts of each step that only decodes, all of kBatch requests.
  std::vector<CountingOps::Counts> DecodeSteps(const proto::DecoderSpec& spec) {
    std::shared_ptr<CountingDevice> device;
    TestingAccess::SetDeviceMaker(*engine_, [&](const CpuDevice::Parts& parts) {
      return device = std::make_shared<CountingDevice>(parts);
    });
    RuntimeConfig config = SmallConfig();
    config.engine_max_batch = kBatch;
    config.engine_max_prefill_length = 16 * kBatch;
    Install(config, spec);
    std::vector<CountingOps::Counts> steps;
    bool decodes = false;
    const HookGuard guard(hook_);
    hook_.Set([&](const StepEvent& event) {
      if (event.phase == StepPhase::kBegin) {
        device->ops().TakeCounts();
        decodes = event.num_decodes == kBatch && event.num_prefill_tokens == 0;
      } else if (event.phase == StepPhase::kEnd && decodes) {
        steps.push_back(device->ops().TakeCounts());
      }
    });
    hook_.loop_gate.Close();
    EXPECT_OK(engine_->StartModel("m"));
    std::vector<StartedRequest> requests;
    for (int64_t i = 0; i < kBatch; ++i) {
      requests.push_back(Start(RandomPrompt(rng_, 9, vocab_size_), Greedy(40)));
    }
    hook_.loop_gate.Open();
    for (const StartedRequest& request : requests) ReadAll(*request.queue);
    EXPECT_OK(engine_->StopModel("m"));
    return steps;
  }
};

TEST_F(DeviceTrafficTest, ADecodeIsOneUploadOneDownloadAndFewOperations) {
  for (const proto::DecoderSpec& spec :
       {testing::TinyLlamaSpec(), testing::TinyQwen3Spec(proto::COMPUTE_BFLOAT16)}) {
    SCOPED_TRACE(spec.architecture());
    engine_ = std::make_unique<Engine>();
    const std::vector<CountingOps::Counts> steps = DecodeSteps(spec);
    ASSERT_GT(steps.size(), 5u);
    for (const CountingOps::Counts& step : steps) {
      EXPECT_EQ(step.uploads, 1);
      // The tokens: logits stay on the device.
      EXPECT_EQ(step.downloads, 1);
      EXPECT_EQ(step.bytes_downloaded, kBatch * 4);
      // Besides the layers: embedding, norm, head and sampling.
      EXPECT_LE(step.launches, 12 * spec.num_layers() + 4);
      // Per sequence: its token, position, row and range, and a table of a few blocks.
      EXPECT_LE(step.bytes_uploaded, kBatch * 128);
    }
  }
}

}  // namespace
}  // namespace allspark
