// The decoder against an independent double-precision one, for every kind of spec and every kernel
// table.
#include <cmath>

#include "cpp/model/decoder_harness.h"
#include "cpp/model/reference_decoder.h"

namespace allspark {
namespace {

using testing::DecoderHarness;
using testing::HarnessOptions;
using testing::Num;
using testing::RandomTokens;
using testing::ReferenceDecoder;

constexpr uint64_t kAccuracySeed = 7;
constexpr int64_t kAccuracyTokens = 45;  // Three blocks of 16, the last one partial.
// In standard deviations, with every rounding counted at its largest. If errors were independent,
// none of the about 50,000 logits compared here should be beyond 5; the errors of the residual
// stream and of its branches are not quite independent. (The worst seen on any table is 2.3.)
constexpr double kDeviations = 6.0;

struct Worst {
  double deviations = 0;
  double error = 0;
  double sigma = 0;
};

// Runs the sequence in chunks of `chunk` tokens and compares every chunk's logits.
Worst Compare(DecoderHarness& harness, const std::vector<int32_t>& tokens, int64_t chunk,
              const testing::Rows& expected) {
  Worst worst;
  const int sequence = harness.Add(tokens);
  while (harness.remaining(sequence) > 0) {
    const auto logits =
        harness.Step({{sequence, std::min(chunk, harness.remaining(sequence)), true}});
    const testing::Row& row = expected[static_cast<size_t>(harness.done(sequence) - 1)];
    for (size_t i = 0; i < row.size(); ++i) {
      const double error = std::abs(static_cast<double>(logits[0][i]) - row[i].v);
      const double sigma = std::sqrt(row[i].e);
      // NaN must not pass.
      if (!(error / sigma <= worst.deviations)) worst = {error / sigma, error, sigma};
    }
  }
  return worst;
}

class DecoderAccuracyTest : public ::testing::TestWithParam<testing::TinySpecMaker> {
 protected:
  void CheckAll(proto::ComputeType compute, CacheMode cache_mode = CacheMode::kDefault) {
    const proto::DecoderSpec spec = GetParam()(compute);
    const auto reader = testing::OpenRandomModel(spec, kAccuracySeed);
    const std::vector<int32_t> tokens = RandomTokens(kAccuracyTokens, spec.vocab_size(), 3);
    const testing::Rows expected = ReferenceDecoder(spec, kAccuracySeed, cache_mode).Logits(tokens);
    for (const kernels::KernelTable* table : testing::TestTables()) {
      if (!testing::AddsTo(*table, spec, cache_mode)) continue;
      HarnessOptions options;
      options.table = table;
      options.num_threads = 2;
      options.cache_mode = cache_mode;
      DecoderHarness harness(*reader, options);
      for (const int64_t chunk : {int64_t{1}, kAccuracyTokens}) {
        const Worst worst = Compare(harness, tokens, chunk, expected);
        EXPECT_LE(worst.deviations, kDeviations)
            << spec.architecture() << ", table " << table->name << ", chunks of " << chunk
            << ": a logit is off by " << worst.error << "; expected deviation " << worst.sigma;
        RecordProperty(std::string(table->name) + "_" + std::to_string(chunk),
                       std::to_string(worst.deviations));
      }
    }
  }
};

TEST_P(DecoderAccuracyTest, Float32) { CheckAll(proto::COMPUTE_FLOAT32); }
TEST_P(DecoderAccuracyTest, BFloat16) { CheckAll(proto::COMPUTE_BFLOAT16); }
TEST_P(DecoderAccuracyTest, Float16) { CheckAll(proto::COMPUTE_FLOAT16); }
TEST_P(DecoderAccuracyTest, CacheOf8Bits) { CheckAll(proto::COMPUTE_FLOAT32, CacheMode::kQuantI8); }
TEST_P(DecoderAccuracyTest, CacheOf4Bits) {
  CheckAll(proto::COMPUTE_BFLOAT16, CacheMode::kQuantU4);
}
TEST_P(DecoderAccuracyTest, CacheOf8And4Bits) {
  CheckAll(proto::COMPUTE_FLOAT32, CacheMode::kQuantK8V4);
}

INSTANTIATE_TEST_SUITE_P(Specs, DecoderAccuracyTest, ::testing::ValuesIn(testing::TinySpecMakers()),
                         [](const auto& test) {
                           return test.param(proto::COMPUTE_FLOAT32).architecture();
                         });

// The bound must be tight enough to detect likely mistakes.
TEST(DecoderAccuracyBoundTest, SeesSmallMistakes) {
  struct Mistake {
    const char* name;
    void (*apply)(proto::DecoderSpec&);
    proto::DecoderSpec (*spec)(proto::ComputeType) = testing::TinyMistralSpec;
  };
  const Mistake mistakes[] = {
      {"norm_eps", [](proto::DecoderSpec& s) { s.set_norm_eps(2e-4f); }},
      {"window", [](proto::DecoderSpec& s) { s.set_layer_window(0, 18); }},
      {"rope", [](proto::DecoderSpec& s) { s.set_rope_interleaved(true); }},
      {"scale", [](proto::DecoderSpec& s) { s.set_attention_scale(0.2501f); }},
      {"soft cap", [](proto::DecoderSpec& s) { s.set_attention_soft_cap(50.0f); }},
      {"activation", [](proto::DecoderSpec& s) { s.set_activation(proto::GELU_ERF); }},
      {"embedding scale", [](proto::DecoderSpec& s) { s.set_embedding_scale(8.01f); },
       testing::TinyGemmaSpec},
      {"logits cap", [](proto::DecoderSpec& s) { s.set_logits_soft_cap(3.01f); },
       testing::TinyGemmaSpec},
      {"window rope", [](proto::DecoderSpec& s) { s.set_window_rope(false); },
       testing::TinyGemmaSpec},
      {"residual scale", [](proto::DecoderSpec& s) { s.set_residual_scale(0.2201f); },
       testing::TinyOlmoSpec},
      {"logits scale", [](proto::DecoderSpec& s) { s.set_logits_scale(0.1251f); },
       testing::TinyOlmoSpec},
      {"norm's mean", [](proto::DecoderSpec& s) { s.set_norm_kind(proto::RMS_NORM); },
       testing::TinyAlibiSpec},
      {"ALiBi", [](proto::DecoderSpec& s) { s.set_alibi(false); }, testing::TinyAlibiSpec},
      {"sequence of attention and MLP",
       [](proto::DecoderSpec& s) { s.set_parallel_residual(false); }, testing::TinyNeoxSpec},
      {"head's bias", [](proto::DecoderSpec& s) { s.set_lm_head_bias(false); },
       testing::TinyNeoxSpec},
      {"learned positions", [](proto::DecoderSpec& s) { s.set_learned_positions(false); },
       testing::TinyGpt2Spec},
      {"normalized experts", [](proto::DecoderSpec& s) { s.set_normalize_expert_weights(false); },
       testing::TinyMixtralSpec},
      {"expert scale", [](proto::DecoderSpec& s) { s.set_expert_weight_scale(1.501f); },
       testing::TinyDeepseekSpec},
      {"groups", [](proto::DecoderSpec& s) { s.set_used_expert_groups(3); },
       testing::TinyDeepseekSpec},
  };
  HarnessOptions options;
  options.table = kernels::DefaultTable();
  for (const Mistake& mistake : mistakes) {
    const proto::DecoderSpec spec = mistake.spec(proto::COMPUTE_FLOAT32);
    const std::vector<int32_t> tokens = RandomTokens(kAccuracyTokens, spec.vocab_size(), 3);
    const auto reader = testing::OpenRandomModel(spec, kAccuracySeed);
    proto::DecoderSpec wrong = spec;
    mistake.apply(wrong);
    DecoderHarness harness(*reader, options);
    const Worst worst =
        Compare(harness, tokens, 1, ReferenceDecoder(wrong, kAccuracySeed).Logits(tokens));
    EXPECT_GT(worst.deviations, 2 * kDeviations) << mistake.name;
  }
}

}  // namespace
}  // namespace allspark
