// A row depends only on its own tokens: the logits of a sequence are bit-identical for any chunks,
// other sequences of the batch, block size, places of blocks and number of threads, and with a
// shared or recomputed prefix. Each kernel table is compared with itself.
#include <cstring>

#include "base/check.h"
#include "cpp/model/decoder_harness.h"

namespace allspark {
namespace {

using testing::DecoderHarness;
using testing::HarnessOptions;
using testing::RandomTokens;

constexpr uint64_t kBitsSeed = 11;
// An odd number of tokens beyond the first attention chunk (256). The reference kernels have no
// chunks, and are slow.
constexpr int64_t kTokens = 275;
constexpr int64_t kReferenceTokens = 85;

using LogitsByPosition = std::vector<std::vector<float>>;

// Expects the same bits, if `actual` has values.
void ExpectSameBits(const std::vector<float>& expected, const std::vector<float>& actual,
                    const std::string& what) {
  ASSERT_EQ(expected.size(), actual.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(std::memcmp(&expected[i], &actual[i], sizeof(float)), 0)
        << what << ", logit " << i << ": " << expected[i] << " alone, " << actual[i] << " here";
  }
}

class DecoderBitsTest
    : public ::testing::TestWithParam<std::tuple<testing::TinySpecMaker, proto::ComputeType,
                                                 const kernels::KernelTable*, CacheMode>> {
 protected:
  DecoderBitsTest()
      : spec_(std::get<0>(GetParam())(std::get<1>(GetParam()))),
        reader_(testing::OpenRandomModel(spec_, kBitsSeed)),
        tokens_(RandomTokens(kTokens, spec_.vocab_size(), 5)) {
    base_.table = std::get<2>(GetParam());
    base_.cache_mode = std::get<3>(GetParam());
    if (IsReference()) tokens_.resize(kReferenceTokens);
    // The expected bits: alone, one token per step, one thread.
    DecoderHarness harness(*reader_, base_);
    const int sequence = harness.Add(tokens_);
    while (harness.remaining(sequence) > 0) {
      expected_.push_back(harness.Step({{sequence, 1, true}})[0]);
    }
  }

  bool IsReference() const { return base_.table == kernels::FindTable("reference"); }

  // Runs `sequence` to its end in chunks of `chunk`.
  void CheckChunks(DecoderHarness& harness, int sequence, int64_t chunk, const std::string& what) {
    while (harness.remaining(sequence) > 0) {
      const auto logits =
          harness.Step({{sequence, std::min(chunk, harness.remaining(sequence)), true}});
      const int64_t position = harness.done(sequence) - 1;
      ExpectSameBits(expected_[static_cast<size_t>(position)], logits[0],
                     what + ", position " + std::to_string(position));
      if (HasFatalFailure()) return;
    }
  }

  // Runs `sequence` with other sequences that come and go, all in random chunks and random order.
  void CheckAmongNeighbours(DecoderHarness& harness, int sequence, int num_neighbours,
                            int64_t max_chunk, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<int> neighbours;
    for (int i = 0; i < num_neighbours; ++i) {
      const int64_t length = 1 + static_cast<int64_t>(random() % 120);
      neighbours.push_back(harness.Add(RandomTokens(length, spec_.vocab_size(), random())));
    }
    while (harness.remaining(sequence) > 0) {
      std::vector<DecoderHarness::Chunk> chunks;
      const auto add = [&](int id, bool wants_logits) {
        const int64_t most = std::min(max_chunk, harness.remaining(id));
        if (most == 0) return;
        const int64_t size = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most));
        chunks.push_back({id, size, wants_logits});
      };
      add(sequence, true);
      for (const int neighbour : neighbours) {
        if (random() % 4 != 0) add(neighbour, random() % 2 == 0);
      }
      std::shuffle(chunks.begin(), chunks.end(), random);
      const auto logits = harness.Step(chunks);
      for (size_t i = 0; i < chunks.size(); ++i) {
        if (chunks[i].sequence != sequence) continue;
        const int64_t position = harness.done(sequence) - 1;
        ExpectSameBits(expected_[static_cast<size_t>(position)], logits[i],
                       "among neighbours, position " + std::to_string(position));
        if (HasFatalFailure()) return;
      }
    }
  }

  proto::DecoderSpec spec_;
  std::unique_ptr<ModelReader> reader_;
  std::vector<int32_t> tokens_;
  HarnessOptions base_;
  LogitsByPosition expected_;
};

TEST_P(DecoderBitsTest, ChunksBlocksAndThreads) {
  struct Variant {
    int64_t chunk;
    int64_t block_size;
    int threads;
    int64_t num_blocks = 0;  // the size of an extent depends on it
  };
  const Variant variants[] = {{kTokens, 16, 1, 67}, {7, 16, 2, 64},   {64, 32, 3, 44},
                              {1, 128, 2},          {kTokens, 64, 3}, {7, 64, 1},
                              {kTokens, 128, 2},    {100, 16, 3}};
  for (const Variant& variant : variants) {
    HarnessOptions options = base_;
    options.block_size = variant.block_size;
    options.num_threads = variant.threads;
    options.num_blocks = variant.num_blocks;
    options.seed = static_cast<uint64_t>(variant.chunk * 31 + variant.block_size);
    DecoderHarness harness(*reader_, options);
    const std::string what = "chunks of " + std::to_string(variant.chunk) + ", blocks of " +
                             std::to_string(variant.block_size) + ", " +
                             std::to_string(variant.threads) + " threads";
    CheckChunks(harness, harness.Add(tokens_), variant.chunk, what);
    if (HasFatalFailure()) return;
  }
}

TEST_P(DecoderBitsTest, Neighbours) {
  struct Variant {
    int neighbours;
    int64_t max_chunk;
    int threads;
    int64_t block_size;
  };
  for (const Variant& variant :
       {Variant{1, 64, 1, 32}, Variant{5, 40, 2, 16}, Variant{31, 12, 3, 64}}) {
    // Many neighbours fill tiles and blocks of rows, which the reference kernels do not have.
    if (IsReference() && variant.neighbours > 5) continue;
    HarnessOptions options = base_;
    options.num_threads = variant.threads;
    options.block_size = variant.block_size;
    options.num_blocks = 40 * 128 / variant.block_size + 16;
    DecoderHarness harness(*reader_, options);
    CheckAmongNeighbours(harness, harness.Add(tokens_), variant.neighbours, variant.max_chunk,
                         static_cast<uint64_t>(variant.neighbours));
    if (HasFatalFailure()) return;
  }
}

TEST_P(DecoderBitsTest, SharedPrefixAndRecompute) {
  HarnessOptions options = base_;
  options.num_threads = 2;
  options.block_size = 32;
  DecoderHarness harness(*reader_, options);
  // The owner of the prefix continues differently.
  std::vector<int32_t> other = tokens_;
  for (size_t i = 64; i < other.size(); ++i) {
    other[i] = (other[i] + 1) % static_cast<int32_t>(spec_.vocab_size());
  }
  const int owner = harness.Add(other);
  harness.Step({{owner, 50, true}});
  harness.Step({{owner, 30, true}});
  const int sequence = harness.AddSharing(tokens_, owner, 64);
  CheckChunks(harness, sequence, 50, "with a shared prefix");
  if (HasFatalFailure()) return;
  const int preempted = harness.Add(tokens_);
  harness.Step({{preempted, 77, true}, {owner, 5, false}});
  harness.Step({{preempted, 1, true}});
  harness.Restart(preempted);
  CheckChunks(harness, preempted, 78, "recomputed after preemption");
}

// Outputs requested after a step have the bits that the step itself would have given.
TEST_P(DecoderBitsTest, MoreOfAStepsTokens) {
  HarnessOptions options = base_;
  options.num_threads = 2;
  DecoderHarness harness(*reader_, options);
  const int neighbour = harness.Add(RandomTokens(9, spec_.vocab_size(), 6));
  const int sequence = harness.Add(tokens_);
  harness.Step({{neighbour, 9, true}, {sequence, 50, false}});
  Decoder& decoder = harness.decoder();
  const auto vocab = static_cast<size_t>(decoder.vocab_size());
  const auto hidden = static_cast<size_t>(decoder.hidden_size());
  const int64_t tokens[] = {9 + 49, 9, 9 + 17};
  std::vector<float> logits(3 * vocab);
  for (int round = 0; round < 2; ++round) {
    decoder.Logits(tokens, 3, logits.data());
    for (size_t i = 0; i < 3; ++i) {
      const auto begin = logits.begin() + static_cast<int64_t>(i * vocab);
      ExpectSameBits(expected_[static_cast<size_t>(tokens[i] - 9)],
                     {begin, begin + static_cast<int64_t>(vocab)}, "afterwards");
    }
    std::vector<float> all(50 * hidden), one(hidden);
    decoder.HiddenStates(9, 50, all.data());
    decoder.HiddenStates(9 + 17, 1, one.data());
    const auto row = all.begin() + static_cast<int64_t>(17 * hidden);
    ExpectSameBits({row, row + static_cast<int64_t>(hidden)}, one, "hidden states");
    decoder.InputEmbeddings(9, 50, all.data());
    decoder.InputEmbeddings(9 + 17, 1, one.data());
    ExpectSameBits({row, row + static_cast<int64_t>(hidden)}, one, "input embeddings");
  }
  EXPECT_THROW(decoder.HiddenStates(9, 51, logits.data()), InternalError);
  EXPECT_THROW(decoder.InputEmbeddings(-1, 1, logits.data()), InternalError);
}

std::string BitsName(const ::testing::TestParamInfo<DecoderBitsTest::ParamType>& p) {
  const auto [make_spec, compute, table, cache] = p.param;
  return testing::SpecName(make_spec, compute) + "_" + table->name +
         (cache == CacheMode::kQuantI8     ? "_int8"
          : cache == CacheMode::kQuantU4   ? "_uint4"
          : cache == CacheMode::kQuantK8V4 ? "_int8_uint4"
                                           : "");
}

// Specs with all compute types and tables.
std::vector<DecoderBitsTest::ParamType> BitsParams(const std::vector<testing::TinySpecMaker>& specs,
                                                   const std::vector<CacheMode>& caches) {
  std::vector<DecoderBitsTest::ParamType> params;
  for (const testing::TinySpecMaker make_spec : specs) {
    for (const auto compute : {proto::COMPUTE_FLOAT32, proto::COMPUTE_BFLOAT16}) {
      const proto::DecoderSpec spec = make_spec(compute);
      for (const kernels::KernelTable* table : testing::TestTables()) {
        for (const CacheMode cache : caches) {
          if (testing::AddsTo(*table, spec, cache)) {
            params.emplace_back(make_spec, compute, table, cache);
          }
        }
      }
    }
  }
  return params;
}

INSTANTIATE_TEST_SUITE_P(All, DecoderBitsTest,
                         ::testing::ValuesIn(BitsParams(testing::TinySpecMakers(),
                                                        {CacheMode::kDefault})),
                         BitsName);
// Specs: plain, with windows, with heads that fill no vector, with ALiBi, and with latents.
INSTANTIATE_TEST_SUITE_P(QuantizedCache, DecoderBitsTest,
                         ::testing::ValuesIn(BitsParams(
                             {testing::TinyLlamaSpec, testing::TinyMistralSpec,
                              testing::TinyOddSpec, testing::TinyAlibiSpec,
                              testing::TinyLatentSpec},
                             {CacheMode::kQuantI8, CacheMode::kQuantU4, CacheMode::kQuantK8V4})),
                         BitsName);

}  // namespace
}  // namespace allspark
