// The tests of numerics_test.cc on emulated instruction sets, for more kinds of models.
#include "cpp/engine/numerics_harness.h"

namespace allspark::testing {
namespace {

class EmulatedNumericsTest : public ::testing::TestWithParam<const kernels::KernelTable*> {
 protected:
  static void Check(const proto::DecoderSpec& spec, int crowd,
                    CacheMode cache_mode = CacheMode::kDefault) {
    SCOPED_TRACE(spec.architecture());
    RuntimeConfig config = SmallConfig();
    config.cache_mode = cache_mode;
    ExpectInvariant(spec, crowd, config, GetParam());
  }
};

TEST_P(EmulatedNumericsTest, BitsAreTheSameForEveryKindOfModel) {
  for (const proto::DecoderSpec& spec : TinySpecs(proto::COMPUTE_BFLOAT16)) Check(spec, 9);
}
TEST_P(EmulatedNumericsTest, BitsAreTheSameWithQuantizedCaches) {
  for (const CacheMode mode : {CacheMode::kQuantI8, CacheMode::kQuantU4}) {
    Check(TinyMistralSpec(proto::COMPUTE_BFLOAT16), 9, mode);
    Check(TinyLatentSpec(proto::COMPUTE_BFLOAT16), 9, mode);
  }
}
TEST_P(EmulatedNumericsTest, BitsAreTheSameInCrowdsOf64) {
  Check(TinyQuantizedSpec(proto::COMPUTE_BFLOAT16), 64);
}

INSTANTIATE_TEST_SUITE_P(Tables, EmulatedNumericsTest, ::testing::ValuesIn(EmulatedTables()),
                         TableName);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EmulatedNumericsTest);  // where there are none

}  // namespace
}  // namespace allspark::testing
