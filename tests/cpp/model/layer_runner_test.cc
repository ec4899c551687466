// The runner goes through layers as a decoder does, and its statistics are those of the inputs.
#include "allspark/layer_runner.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>

#include "memory/system_allocator.h"
#include "model/input_statistics.h"
#include "ops/cpu/cpu_device.h"
#include "ops/linear.h"
#include "platform/thread_pool.h"
#include "support/constants.h"
#include "support/environment.h"
#include "support/process_usage.h"
#include "support/random_model.h"
#include "support/sanitized.h"
#include "support/test_tables.h"
#include "tensor/tensor_view.h"

namespace allspark {
namespace {

using testing::MakeRandomModel;

constexpr uint64_t kRunnerSeed = 11;
constexpr int64_t kLength = 40;

std::vector<int32_t> Ids(const proto::DecoderSpec& spec, int64_t sequences) {
  std::vector<int32_t> ids(static_cast<size_t>(sequences * kLength));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>(i * i % static_cast<size_t>(spec.vocab_size()));
  }
  return ids;
}

std::unique_ptr<LayerRunner> Runner(const proto::DecoderSpec& spec, int64_t threads = 1) {
  auto runner = LayerRunner::Create(MakeRandomModel(spec, kRunnerSeed),
                                    {.num_threads = threads, .length = kLength});
  EXPECT_TRUE(runner.ok()) << runner.status().ToString();
  return std::move(*runner);
}

std::vector<float> StreamAfter(LayerRunner& runner, const std::vector<int32_t>& ids) {
  std::vector<float> stream(ids.size() * static_cast<size_t>(runner.hidden_size()));
  const auto sequences = static_cast<int64_t>(ids.size()) / kLength;
  const Status status = runner.Run(ids.data(), nullptr, sequences, stream.data());
  EXPECT_TRUE(status.ok()) << status.ToString();
  return stream;
}

// A spec whose layers are `count` of another's, which has more.
proto::DecoderSpec Shortened(proto::DecoderSpec spec, int64_t count) {
  spec.set_num_layers(count);
  if (spec.layer_window_size() > 0) spec.mutable_layer_window()->Truncate(static_cast<int>(count));
  return spec;
}

TEST(LayerRunner, TheStreamIsTheSameWhateverTheThreadsAndTheSequencesBeside) {
  for (const auto& spec :
       {testing::TinyLlamaSpec(), testing::TinyGemmaSpec(), testing::TinyAlibiSpec(),
        testing::TinyDbrxSpec(), testing::TinyQuantizedMoeSpec(), testing::TinyLatentSpec()}) {
    const std::vector<int32_t> ids = Ids(spec, 3);
    const std::vector<float> together = StreamAfter(*Runner(spec), ids);
    EXPECT_EQ(StreamAfter(*Runner(spec, 3), ids), together) << spec.architecture();
    const std::vector<int32_t> last(ids.end() - kLength, ids.end());
    const std::vector<float> alone = StreamAfter(*Runner(spec), last);
    const std::span<const float> end(together.data() + together.size() - alone.size(),
                                     alone.size());
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), end.begin())) << spec.architecture();
  }
}

TEST(LayerRunner, ALayerGoesOnWhereTheOneBeforeEnded) {
  // The second layer adds nothing, so the stream after both is the input of the second.
  const proto::DecoderSpec spec = testing::TinyLlamaSpec();
  auto silent = LayerRunner::Create(MakeRandomModel(spec, kRunnerSeed, /*silent_from=*/1),
                                    {.num_threads = 1, .length = kLength});
  ASSERT_TRUE(silent.ok());
  const std::vector<int32_t> ids = Ids(spec, 2);
  const std::vector<float> after_first = StreamAfter(**silent, ids);

  std::vector<float> kept = after_first;
  ASSERT_TRUE((*silent)->Run(nullptr, kept.data(), 2, nullptr).ok());  // the input is not changed
  EXPECT_EQ(kept, after_first);

  // From the stream, a runner makes what it makes from the ids that gave the stream.
  proto::DecoderSpec none = Shortened(spec, 1);
  auto embeds = LayerRunner::Create(MakeRandomModel(none, kRunnerSeed, /*silent_from=*/0),
                                    {.num_threads = 1, .length = kLength});
  ASSERT_TRUE(embeds.ok());
  std::vector<float> stream = StreamAfter(**embeds, ids);  // the embeddings alone
  ASSERT_TRUE((*silent)->Run(nullptr, stream.data(), 2, stream.data()).ok());  // in place
  EXPECT_EQ(stream, after_first);
}

TEST(LayerRunner, PassesDoNotDependOnHowManySequencesThereAre) {
  const proto::DecoderSpec spec = testing::TinyLlamaSpec();
  // Of 2048 tokens a pass: 51 sequences of 40.
  const std::vector<int32_t> ids = Ids(spec, 53);
  const std::vector<float> all = StreamAfter(*Runner(spec), ids);
  auto runner = Runner(spec);
  const size_t row = kLength * static_cast<size_t>(runner->hidden_size());
  for (const size_t i : {0u, 50u, 51u, 52u}) {
    const std::vector<int32_t> own(ids.begin() + static_cast<int64_t>(i) * kLength,
                                   ids.begin() + static_cast<int64_t>(i + 1) * kLength);
    const std::vector<float> one = StreamAfter(*runner, own);
    EXPECT_EQ(std::memcmp(one.data(), all.data() + i * row, row * sizeof(float)), 0) << i;
  }
}

constexpr int64_t kRows = 1101;  // steps of 512, the last not full and odd

float Value(float x) { return x; }
float Value(BFloat16 x) { return ToFloat(x); }

// The collector's sums of rows that come in two parts, against those in double precision.
template <typename T>
void ExpectSums(const kernels::KernelTable& table, DType dtype, const std::vector<T>& x,
                int64_t features, int64_t ld) {
  ThreadPool pool(2, false);
  SystemAllocator allocator(int64_t{1} << 30);
  CpuDevice device(allocator, pool, table);
  InputCollector collector(device);
  const float weight = 0;
  collector.Add("w", &weight, 1, 0, features);
  LinearWeight linear;
  linear.data = &weight;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 701}, {701, kRows}}) {
    collector.See(linear, {x.data() + begin * ld, dtype, end - begin, features, ld});
  }
  const std::optional<InputStatistics> found = collector.Take("w", 0);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->num_tokens, kRows);
  EXPECT_FALSE(collector.Take("w", 1).has_value());
  EXPECT_EQ(collector.Take("w", 0)->num_tokens, 0);  // they begin anew
  const auto at = [&](int64_t row, int64_t i) {
    return static_cast<double>(Value(x[static_cast<size_t>(row * ld + i)]));
  };
  // Each product rounds by half a unit in the last place at most, and each sum of at most kRows
  // terms, too: together below kRows such units of the sum of magnitudes.
  const double bound = kRows * 0x1p-24;
  for (int64_t i = 0; i < features; ++i) {
    double sum = 0, largest = 0;
    for (int64_t row = 0; row < kRows; ++row) {
      sum += std::fabs(at(row, i));
      largest = std::max(largest, std::fabs(at(row, i)));
    }
    EXPECT_EQ(found->sum_abs[static_cast<size_t>(i)], sum);
    EXPECT_EQ(static_cast<double>(found->max_abs[static_cast<size_t>(i)]), largest);
    for (int64_t j = 0; j < features; j += 7) {
      double product = 0, magnitude = 0;
      for (int64_t row = 0; row < kRows; ++row) {
        product += at(row, i) * at(row, j);
        magnitude += std::fabs(at(row, i) * at(row, j));
      }
      const float got = found->products[static_cast<size_t>(i * features + j)];
      EXPECT_NEAR(static_cast<double>(got), product, bound * magnitude)
          << table.name << " " << DTypeName(dtype) << " " << i << " " << j;
      EXPECT_EQ(got, found->products[static_cast<size_t>(j * features + i)]);
    }
  }
}

TEST(InputCollector, SumsAreThoseOfAllRowsWithEveryKernel) {
  for (const kernels::KernelTable* table : kernels::AvailableTables()) {
    for (const int64_t features : {8, 64, 200}) {
      const int64_t ld = features + 3;
      std::vector<float> x(static_cast<size_t>(kRows * ld));
      for (size_t i = 0; i < x.size(); ++i) {
        x[i] = static_cast<float>(std::sin(0.37 * static_cast<double>(i)));
      }
      std::vector<BFloat16> rounded(x.size());
      for (size_t i = 0; i < x.size(); ++i) rounded[i] = ToBFloat16(x[i]);
      ExpectSums(*table, DType::kFloat32, x, features, ld);
      ExpectSums(*table, DType::kBFloat16, rounded, features, ld);
    }
  }
}

TEST(LayerRunner, StatisticsAreTheSameWithAnyNumberOfThreads) {
  proto::DecoderSpec spec = testing::TinyMixtralSpec();
  const std::vector<int32_t> ids = Ids(spec, 8);
  const std::vector<std::string> names = {"layers.0.qkv", "layers.1.o", "layers.1.experts_gate_up",
                                          "layers.1.experts_down"};
  auto one = Runner(spec, 1), three = Runner(spec, 3);
  int64_t tokens = 0;
  for (LayerRunner* runner : {one.get(), three.get()}) {
    ASSERT_TRUE(runner->Observe(names).ok());
    ASSERT_TRUE(runner->Run(ids.data(), nullptr, 8, nullptr).ok());
  }
  for (const std::string& name : names) {
    const bool experts = name.find("experts") != std::string::npos;
    for (int64_t e = 0; e < (experts ? spec.num_experts() : 1); ++e) {
      auto a = one->TakeStatistics(name, e), b = three->TakeStatistics(name, e);
      ASSERT_TRUE(a.ok() && b.ok()) << name;
      EXPECT_EQ(a->num_tokens, b->num_tokens);
      EXPECT_EQ(a->sum_abs, b->sum_abs);
      EXPECT_EQ(a->max_abs, b->max_abs);
      EXPECT_EQ(a->products, b->products);
      if (name == "layers.1.experts_down") tokens += a->num_tokens;
    }
    EXPECT_EQ(one->TakeStatistics(name, experts ? spec.num_experts() : 1).status().code(),
              StatusCode::kNotFound);
  }
  EXPECT_EQ(tokens, 8 * kLength * spec.experts_per_token());
}

TEST(LayerRunner, MagnitudesAreTheSameWithoutProducts) {
  const proto::DecoderSpec spec = testing::TinyLlamaSpec();
  const std::vector<int32_t> ids = Ids(spec, 2);
  auto with = Runner(spec), without = Runner(spec);
  ASSERT_TRUE(with->Observe({"layers.1.down"}).ok());
  ASSERT_TRUE(without->Observe({"layers.1.down"}, /*products=*/false).ok());
  for (LayerRunner* runner : {with.get(), without.get()}) {
    ASSERT_TRUE(runner->Run(ids.data(), nullptr, 2, nullptr).ok());
  }
  auto full = with->TakeStatistics("layers.1.down", 0);
  auto cheap = without->TakeStatistics("layers.1.down", 0);
  ASSERT_TRUE(full.ok() && cheap.ok());
  EXPECT_EQ(cheap->num_tokens, full->num_tokens);
  EXPECT_EQ(cheap->sum_abs, full->sum_abs);
  EXPECT_EQ(cheap->max_abs, full->max_abs);
  EXPECT_FALSE(full->products.empty());
  EXPECT_TRUE(cheap->products.empty());
}

TEST(LayerRunner, ASequenceMayBeOneToken) {
  const proto::DecoderSpec spec = testing::TinyLlamaSpec();
  const std::vector<int32_t> ids = Ids(spec, 1);
  const std::vector<float> longer = StreamAfter(*Runner(spec), ids);
  auto runner = LayerRunner::Create(MakeRandomModel(spec, kRunnerSeed), {.length = 1});
  ASSERT_TRUE(runner.ok()) << runner.status().ToString();
  std::vector<float> alone(static_cast<size_t>((*runner)->hidden_size()));
  ASSERT_TRUE((*runner)->Run(ids.data(), nullptr, 1, alone.data()).ok());
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), longer.begin()));
}

TEST(LayerRunner, WhatDoesNotFitIsNamed) {
  const proto::DecoderSpec spec = testing::TinyLlamaSpec();
  const auto image = MakeRandomModel(spec, kRunnerSeed);
  const auto message = [&](const LayerRunnerOptions& options) {
    return LayerRunner::Create(image, options).status().ToString();
  };
  EXPECT_NE(message({.length = 0}).find("length is 0"), std::string::npos);
  EXPECT_NE(message({.length = (1 << 24) + 1}).find("length is 16777217"), std::string::npos);
  EXPECT_NE(message({.isa = "abacus", .length = 8}).find("isa is 'abacus'"), std::string::npos);
  {
    const testing::ScopedVariable isa("ALLSPARK_CPU_ISA", "abacus");
    EXPECT_NE(message({.length = 8}).find("ALLSPARK_CPU_ISA is 'abacus', which"),
              std::string::npos);
  }
  EXPECT_NE(message({.num_threads = -1, .length = 8}).find("num_threads is -1"), std::string::npos);
  EXPECT_FALSE(LayerRunner::Create(nullptr, {.length = 8}).ok());
  const auto learned = MakeRandomModel(testing::TinyGpt2Spec(), kRunnerSeed);
  const int64_t longest = testing::TinyGpt2Spec().max_position();
  EXPECT_TRUE(LayerRunner::Create(learned, {.length = longest}).ok());
  EXPECT_NE(LayerRunner::Create(learned, {.length = longest + 1})
                .status()
                .message()
                .find("length is " + std::to_string(longest + 1) + "; it must be at most"),
            std::string::npos);

  auto runner = Runner(spec);
  EXPECT_EQ(runner->Observe({"layers.0.nothing"}).code(), StatusCode::kNotFound);
  EXPECT_EQ(runner->Observe({"layers.0.attention_norm"}).code(), StatusCode::kInvalidArgument);
  auto latent = Runner(testing::TinyLatentSpec());
  for (const std::string name : {"layers.0.k_up", "layers.1.v_up"}) {
    const Status refused = latent->Observe({name});
    EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(refused.message().find("'" + name + "'"), std::string::npos) << refused.ToString();
  }
  std::vector<int32_t> ids = Ids(spec, 1);
  ids[3] = static_cast<int32_t>(spec.vocab_size());
  const Status status = runner->Run(ids.data(), nullptr, 1, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.ToString().find("ids[3]"), std::string::npos) << status.ToString();
}

TEST(LayerRunner, ThreadsThatTheSystemDoesNotGiveAreNamed) {
  if (AS_SANITIZED) return;  // Its own memory counts, too.
  const auto image = MakeRandomModel(testing::TinyLlamaSpec(), kRunnerSeed);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  // Room for the stacks of some of the threads.
  rlimit little = before;
  little.rlim_cur =
      static_cast<rlim_t>(testing::ReadMemoryUsage().mapped_bytes + 256 * testing::kMiB);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &little), 0);
  const Status status = LayerRunner::Create(image, {.num_threads = 4096, .length = 8}).status();
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("num_threads is 4096"), std::string::npos) << status.ToString();
}

TEST(LayerRunner, ANumberThatIsNotFiniteIsNamedByWeightAndToken) {
  const proto::DecoderSpec spec = testing::TinyLlamaSpec();
  auto runner = Runner(spec);
  std::vector<float> stream = StreamAfter(*runner, Ids(spec, 2));
  const size_t row = static_cast<size_t>(runner->hidden_size());
  stream[(kLength + 7) * row + 1] = std::nanf("");
  const std::vector<std::string> names = {"layers.0.qkv", "layers.1.down"};
  ASSERT_TRUE(runner->Observe(names).ok());
  const Status status = runner->Run(nullptr, stream.data(), 2, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_NE(status.ToString().find("'layers.0.qkv' at token 7 of sequence 1"), std::string::npos)
      << status.ToString();
  // The next run's statistics are its own alone.
  stream[(kLength + 7) * row + 1] = 0;
  auto fresh = Runner(spec);
  ASSERT_TRUE(fresh->Observe(names).ok());
  for (LayerRunner* each : {runner.get(), fresh.get()}) {
    ASSERT_TRUE(each->Run(nullptr, stream.data(), 2, nullptr).ok());
  }
  for (const std::string& name : names) {
    const auto found = runner->TakeStatistics(name, 0), expected = fresh->TakeStatistics(name, 0);
    ASSERT_TRUE(found.ok() && expected.ok()) << name;
    EXPECT_EQ(found->num_tokens, 2 * kLength) << name;
    EXPECT_EQ(found->sum_abs, expected->sum_abs) << name;
    EXPECT_EQ(found->products, expected->products) << name;
  }
}

}  // namespace
}  // namespace allspark
