// Adapters in the decoder: the logits against the double-precision decoder with the same adapter,
// and bit by bit against the sequence alone, in batches of any adapters and none.
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "cpp/model/decoder_harness.h"
#include "cpp/model/reference_decoder.h"
#include "model/lora.h"
#include "support/random_lora.h"

namespace allspark {
namespace {

using testing::DecoderHarness;
using testing::HarnessOptions;
using testing::RandomLora;
using testing::RandomTokens;
using testing::ReferenceDecoder;

constexpr uint64_t kLoraSeed = 7;
constexpr int64_t kMaxRank = 16;

Result<std::shared_ptr<const LoraAdapter>> TryLoad(const LoraFile& file, const ModelReader& model,
                                                   Allocator& allocator,
                                                   const kernels::KernelTable* table = nullptr) {
  const auto shape = MakeDecoderShape(model.spec(), CacheMode::kDefault);
  ThreadPool pool(1, false);
  CpuDevice device(allocator, pool, table != nullptr ? *table : *kernels::DefaultTable());
  return LoraAdapter::Create(file, model, *shape, kMaxRank, device);
}

std::shared_ptr<const LoraAdapter> Load(const LoraFile& file, const ModelReader& model,
                                        Allocator& allocator) {
  return testing::Must(TryLoad(file, model, allocator));
}

class DecoderLoraTest
    : public ::testing::TestWithParam<
          std::tuple<testing::TinySpecMaker, proto::ComputeType, const kernels::KernelTable*>> {
 protected:
  DecoderLoraTest()
      : spec_(std::get<0>(GetParam())(std::get<1>(GetParam()))),
        reader_(testing::OpenRandomModel(spec_, kLoraSeed)) {
    options_.table = std::get<2>(GetParam());
    options_.lora_max_rank = kMaxRank;
  }

  proto::DecoderSpec spec_;
  std::unique_ptr<ModelReader> reader_;
  HarnessOptions options_;
  SystemAllocator allocator_{int64_t{1} << 30};
};

// The bound is that of DecoderAccuracyTest; without the adapter the logits must exceed it.
TEST_P(DecoderLoraTest, GivesTheLogitsOfTheAdaptedModel) {
  const std::vector<int32_t> tokens = RandomTokens(37, spec_.vocab_size(), 3);
  RandomLora lora(5);
  lora.AddAll(spec_, 8);
  ReferenceDecoder reference(spec_, kLoraSeed);
  reference.SetLora(&lora);
  const testing::Rows expected = reference.Logits(tokens);
  const auto adapter = Load(lora, *reader_, allocator_);
  options_.num_threads = 2;
  const auto worst = [&](const LoraAdapter* used, int64_t chunk) {
    DecoderHarness harness(*reader_, options_);
    const int sequence = harness.Add(tokens, used);
    double deviations = 0;
    while (harness.remaining(sequence) > 0) {
      const auto logits =
          harness.Step({{sequence, std::min(chunk, harness.remaining(sequence)), true}});
      const testing::Row& row = expected[static_cast<size_t>(harness.done(sequence) - 1)];
      for (size_t i = 0; i < row.size(); ++i) {
        const double error = std::abs(static_cast<double>(logits[0][i]) - row[i].v);
        if (!(error / std::sqrt(row[i].e) <= deviations)) deviations = error / std::sqrt(row[i].e);
      }
    }
    return deviations;
  };
  EXPECT_LE(worst(adapter.get(), 1), 6.0);
  EXPECT_LE(worst(adapter.get(), 37), 6.0);
  EXPECT_GT(worst(nullptr, 37), 12.0);
}

// Sequences with different adapters and none, with random chunks, orders, threads and blocks.
TEST_P(DecoderLoraTest, BitsDependOnNoOtherAdapter) {
  RandomLora everything(5), other(6), attention(7), head(8);
  const int64_t q = spec_.num_heads() * spec_.head_dim();
  if (spec_.kv_latent() > 0) {
    attention.Add("layers.0.q", 0, q, spec_.q_latent(), 5);
  } else {
    attention.Add("layers.0.qkv", 0, q, spec_.hidden_size(), 5);
  }
  head.Add("lm_head", 0, spec_.vocab_size(), spec_.hidden_size(), kMaxRank);
  std::vector<std::shared_ptr<const LoraAdapter>> adapters = {
      nullptr, Load(everything.AddAll(spec_, 8), *reader_, allocator_),
      Load(other.AddAll(spec_, kMaxRank), *reader_, allocator_),
      Load(attention, *reader_, allocator_), Load(head, *reader_, allocator_)};
  constexpr size_t kSequences = 9;
  // The reference kernels have no row blocks, and are slow.
  const int64_t num_tokens = options_.table == kernels::FindTable("reference") ? 25 : 70;
  std::vector<std::vector<int32_t>> tokens;
  std::vector<std::vector<std::vector<float>>> expected;
  for (size_t i = 0; i < kSequences; ++i) {
    tokens.push_back(RandomTokens(num_tokens, spec_.vocab_size(), i));
    DecoderHarness alone(*reader_, options_);
    const int sequence = alone.Add(tokens[i], adapters[i % adapters.size()].get());
    expected.emplace_back();
    while (alone.remaining(sequence) > 0) {
      expected[i].push_back(alone.Step({{sequence, 1, true}})[0]);
    }
  }
  std::mt19937_64 random(9);
  for (const int threads : {1, 3}) {
    HarnessOptions options = options_;
    options.num_threads = threads;
    options.block_size = 32;
    DecoderHarness harness(*reader_, options);
    std::vector<int> sequences;
    for (size_t i = 0; i < kSequences; ++i) {
      sequences.push_back(harness.Add(tokens[i], adapters[i % adapters.size()].get()));
    }
    std::vector<DecoderHarness::Chunk> chunks;
    do {
      chunks.clear();
      for (const int sequence : sequences) {
        const int64_t left = harness.remaining(sequence);
        if (left == 0 || random() % 4 == 0) continue;
        // Sometimes more rows than one work item takes.
        const int64_t most = std::min<int64_t>(left, random() % 4 == 0 ? 50 : 3);
        chunks.push_back(
            {sequence, 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most)), true});
      }
      std::shuffle(chunks.begin(), chunks.end(), random);
      const auto logits = harness.Step(chunks);
      for (size_t i = 0; i < chunks.size(); ++i) {
        const auto s = static_cast<size_t>(chunks[i].sequence);
        const auto position = static_cast<size_t>(harness.done(chunks[i].sequence) - 1);
        const std::vector<float>& alone = expected[s][position];
        ASSERT_EQ(std::memcmp(alone.data(), logits[i].data(), alone.size() * sizeof(float)), 0)
            << "sequence " << s << " position " << position << ", " << threads << " threads";
      }
    } while (std::any_of(sequences.begin(), sequences.end(),
                         [&](int s) { return harness.remaining(s) > 0; }));
  }
}

std::string LoraTestName(const ::testing::TestParamInfo<DecoderLoraTest::ParamType>& p) {
  const auto [make_spec, compute, table] = p.param;
  return testing::SpecName(make_spec, compute) + "_" + table->name;
}

std::vector<DecoderLoraTest::ParamType> LoraParams() {
  std::vector<DecoderLoraTest::ParamType> params;
  for (const testing::TinySpecMaker make_spec :
       {testing::TinyLlamaSpec, testing::TinyQwen2Spec, testing::TinyQwen3Spec,
        testing::TinyMistralSpec, testing::TinyOddSpec, testing::TinyQuantizedSpec,
        testing::TinyNeoxSpec, testing::TinyGpt2Spec, testing::TinyLatentSpec,
        testing::TinyReorderedSpec, testing::TinyReorderedParallelSpec,
        testing::TinyReorderedLatentSpec, testing::TinyScaledSpec, testing::TinyScaledLatentSpec,
        testing::TinyFormsSpec}) {
    for (const auto compute : {proto::COMPUTE_FLOAT32, proto::COMPUTE_BFLOAT16}) {
      const proto::DecoderSpec spec = make_spec(compute);
      for (const kernels::KernelTable* table : testing::TestTables()) {
        if (testing::AddsTo(*table, spec)) params.emplace_back(make_spec, compute, table);
      }
    }
  }
  return params;
}

INSTANTIATE_TEST_SUITE_P(All, DecoderLoraTest, ::testing::ValuesIn(LoraParams()), LoraTestName);

TEST(LoraAdapterTest, RefusesWhatIsNotTheModels) {
  const proto::DecoderSpec spec = testing::TinyLlamaSpec();
  const auto model = testing::OpenRandomModel(spec, kLoraSeed);
  SystemAllocator allocator(int64_t{1} << 30);
  const auto refusal = [&](const std::string& tensor, int64_t row_begin, int64_t rows, int64_t cols,
                           int64_t rank) {
    RandomLora lora(1);
    lora.Add("layers.0.qkv", 0, 64, 64, 4);
    if (rows > 0) lora.Add(tensor, row_begin, rows, cols, rank);
    return TryLoad(lora, *model, allocator).status();
  };
  EXPECT_TRUE(refusal("", 0, 0, 0, 0).ok());
  const auto expect = [&](const Status& status, const std::string& part) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  };
  expect(refusal("layers.2.qkv", 0, 64, 64, 4), "'layers.2.qkv' is for a weight");
  expect(refusal("layers.1.v", 0, 64, 64, 4), "'layers.1.v' is for a weight");
  expect(refusal("layers.1.o", 0, 64, 63, 4), "reads 63 features; the model has 64");
  expect(refusal("layers.1.o", 32, 33, 64, 4), "rows [32, 65); the model's modules end at 64");
  expect(refusal("layers.1.qkv", 32, 32, 64, 4), "rows [32, 64); the model's modules end at");
  expect(refusal("layers.1.qkv", 64, 31, 64, 4), "rows [64, 95); the model's modules end at");
  expect(refusal("layers.1.gate_up", 0, 65, 64, 4), "rows [0, 65); the model's modules end at");
  expect(refusal("layers.0.qkv", 0, 64, 64, 4), "has row 0 twice");
  const Status rank = refusal("layers.1.o", 0, 64, 64, kMaxRank + 1);
  expect(rank, "rank 17; lora_max_rank is 16");
  EXPECT_EQ(rank.as_status(), AsStatus::kLoraRankExceedLimitError);
  expect(TryLoad(RandomLora(1), *model, allocator).status(), "adapts nothing");
  RandomLora infinite(1);
  infinite.Add("lm_head", 0, 131, 64, 2);
  const_cast<float*>(infinite.pairs()[0].a)[3] = std::numeric_limits<float>::max();
  const auto rounded =
      testing::OpenRandomModel(testing::TinyLlamaSpec(proto::COMPUTE_BFLOAT16), kLoraSeed);
  expect(TryLoad(infinite, *rounded, allocator).status(), "not finite");
  kernels::KernelTable lacking = *kernels::DefaultTable();
  lacking.low_rank[static_cast<int>(DType::kFloat32)] = nullptr;
  EXPECT_EQ(TryLoad(RandomLora(1).Add("lm_head", 0, 131, 64, 2), *model, allocator, &lacking)
                .status()
                .code(),
            StatusCode::kUnimplemented);
  EXPECT_EQ(allocator.Stats().bytes_in_use, 0);
}

TEST(LoraAdapterTest, ADecoderWithoutRoomRefusesIt) {
  const proto::DecoderSpec spec = testing::TinyLlamaSpec();
  const auto reader = testing::OpenRandomModel(spec, kLoraSeed);
  SystemAllocator allocator(int64_t{1} << 30);
  RandomLora lora(1);
  const auto adapter = Load(lora.AddAll(spec, 8), *reader, allocator);
  HarnessOptions options;
  options.table = kernels::DefaultTable();
  options.lora_max_rank = 7;
  DecoderHarness harness(*reader, options);
  const int sequence = harness.Add({1, 2, 3}, adapter.get());
  EXPECT_THROW(harness.Step({{sequence, 3, true}}), InternalError);
}

}  // namespace
}  // namespace allspark
