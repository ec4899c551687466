// The memory that Forward needs, and the batches that it refuses because they break an invariant.
#include <algorithm>
#include <cmath>
#include <set>

#include "base/check.h"
#include "cpp/model/decoder_harness.h"
#include "ops/op_profile.h"
#include "support/alloc_counter.h"

namespace allspark {
namespace {

using testing::AllocationCounter;
using testing::DecoderHarness;
using testing::HarnessOptions;
using testing::OpenRandomModel;
using testing::RandomTokens;

HarnessOptions SmallOptions(int threads) {
  HarnessOptions options;
  options.table = kernels::DefaultTable();
  options.num_threads = threads;
  options.max_length = 100;
  options.max_tokens = 96;
  options.max_logits_rows = 5;
  return options;
}

class DecoderMemoryTest : public ::testing::TestWithParam<std::tuple<testing::TinySpecMaker, int>> {
};

TEST_P(DecoderMemoryTest, ArenaHoldsTheLargestBatchExactly) {
  const auto [make_spec, threads] = GetParam();
  for (const proto::ComputeType compute : {proto::COMPUTE_FLOAT32, proto::COMPUTE_BFLOAT16}) {
    const proto::DecoderSpec spec = make_spec(compute);
    const auto reader = OpenRandomModel(spec, 1);
    DecoderHarness harness(*reader, SmallOptions(threads));
    std::vector<DecoderHarness::Chunk> chunks;
    for (int i = 0; i < 5; ++i) {
      harness.Add(RandomTokens(100, spec.vocab_size(), static_cast<uint64_t>(i)));
      chunks.push_back({i, i == 0 ? 92 : 1, true});
    }
    for (int64_t rows = 0; rows < 5; ++rows) {
      // Smaller batches first: none may need more memory than the largest.
      harness.Step({{static_cast<int>(rows), 3 * rows + 1, rows % 2 == 0}});
    }
    for (DecoderHarness::Chunk& chunk : chunks) {
      chunk.num_tokens = std::min(chunk.num_tokens, harness.remaining(chunk.sequence));
    }
    harness.Step(chunks);
    EXPECT_EQ(harness.arena().peak(), harness.decoder().arena_bytes());
    EXPECT_LE(harness.arena().peak(), harness.arena().capacity());
  }
}

TEST_P(DecoderMemoryTest, ForwardAllocatesNothing) {
  const auto [make_spec, threads] = GetParam();
  const proto::DecoderSpec spec = make_spec(proto::COMPUTE_BFLOAT16);
  const auto reader = OpenRandomModel(spec, 1);
  DecoderHarness harness(*reader, SmallOptions(threads));
  for (int i = 0; i < 5; ++i) {
    harness.Add(RandomTokens(100, spec.vocab_size(), static_cast<uint64_t>(i)));
  }
  // From the very first step: there is nothing to warm up.
  AllocationCounter counter;
  const int64_t device_allocs = harness.allocator().Stats().num_allocs;
  for (const std::vector<DecoderHarness::Chunk>& chunks :
       {std::vector<DecoderHarness::Chunk>{{0, 1, true}},
        std::vector<DecoderHarness::Chunk>{{0, 7, true}, {1, 70, false}, {2, 1, true}},
        std::vector<DecoderHarness::Chunk>{
            {0, 1, true}, {1, 1, true}, {2, 1, true}, {3, 1, true}, {4, 1, true}}}) {
    harness.Prepare(chunks);
    harness.pool().ForEachThread([&](int) { counter.Start(); });
    harness.Run();
    harness.pool().ForEachThread([&](int) { counter.Stop(); });
  }
  EXPECT_EQ(counter.count(), 0);
  EXPECT_EQ(harness.allocator().Stats().num_allocs, device_allocs);
}

INSTANTIATE_TEST_SUITE_P(All, DecoderMemoryTest,
                         ::testing::Combine(::testing::ValuesIn(testing::TinySpecMakers()),
                                            ::testing::Values(1, 2, 3)),
                         [](const auto& test) {
                           return std::get<0>(test.param)(proto::COMPUTE_FLOAT32).architecture() +
                                  "_" + std::to_string(std::get<1>(test.param));
                         });

// Of the last of three tokens, which lie at places 0 to 2 of the cache.
std::vector<float> LogitsAt(const ModelReader& reader, const std::vector<int32_t>& positions) {
  DecoderHarness harness(reader, SmallOptions(2));
  harness.Add(RandomTokens(3, reader.spec().vocab_size(), 1));
  harness.Prepare({{0, 3, true}});
  std::copy(positions.begin(), positions.end(), harness.positions().begin());
  harness.Run();
  return harness.logits();
}

float MaxDifference(const std::vector<float>& a, const std::vector<float>& b) {
  float most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

TEST(DecoderPositionsTest, ABatchMayGiveOthersThanThePlacesInTheCache) {
  const auto reader = OpenRandomModel(testing::TinyLlamaSpec(proto::COMPUTE_FLOAT32), 1);
  const std::vector<float> own = LogitsAt(*reader, {0, 1, 2});
  // Rotations are relative: a distance that is added to all positions changes roundings alone.
  const float shifted = MaxDifference(LogitsAt(*reader, {40, 41, 42}), own);
  EXPECT_LT(shifted, 1e-5);
  // Other distances change the scores.
  EXPECT_GT(MaxDifference(LogitsAt(*reader, {0, 1, 50}), own), 1e-3);
  EXPECT_GT(MaxDifference(LogitsAt(*reader, {7, 7, 7}), own), 1e-3);
}

class DecoderBatchTest : public ::testing::Test {
 protected:
  DecoderBatchTest() : reader_(OpenRandomModel(testing::TinyLlamaSpec(), 1)) {
    harness_ = std::make_unique<DecoderHarness>(*reader_, SmallOptions(2));
    for (int i = 0; i < 3; ++i) {
      harness_->Add(RandomTokens(100, 131, static_cast<uint64_t>(i)));
    }
    harness_->Prepare({{0, 4, true}, {1, 20, true}, {2, 1, false}});
  }
  // Forward must throw with `part` in the message.
  void ExpectRefused(const std::string& part) {
    try {
      harness_->Run();
      ADD_FAILURE() << "no error; expected one with: " << part;
    } catch (const InternalError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
  std::vector<BatchSequence>& sequences() { return harness_->batch_sequences(); }

  std::unique_ptr<ModelReader> reader_;
  std::unique_ptr<DecoderHarness> harness_;
};

TEST_F(DecoderBatchTest, RefusesTooManyTokens) {
  harness_->batch().num_tokens = 97;
  ExpectRefused("97 tokens; at most 96");
}
TEST_F(DecoderBatchTest, RefusesTooManyLogitsRows) {
  harness_->batch().num_logits_rows = 6;
  ExpectRefused("6 logits rows; at most 5");
}
TEST_F(DecoderBatchTest, RefusesGapsBetweenSequences) {
  ++sequences()[1].token_begin;
  ExpectRefused("sequence 1 has tokens [5, +20)");
}
TEST_F(DecoderBatchTest, RefusesTokensOfNoSequence) {
  harness_->batch().num_sequences = 2;
  ExpectRefused("the sequences have 24 tokens of 25");
}
TEST_F(DecoderBatchTest, RefusesAnEmptySequence) {
  sequences()[0].num_tokens = 0;
  ExpectRefused("sequence 0 has positions [0, 0)");
}
TEST_F(DecoderBatchTest, RefusesPositionsPastTheEnd) {
  sequences()[1].position = 81;
  ExpectRefused("positions [81, 101); the decoder covers [0, 100)");
}
TEST_F(DecoderBatchTest, RefusesPositionsWithoutARope) {
  for (const int32_t bad : {-1, 100}) {
    harness_->positions()[2] = bad;
    ExpectRefused("token 2 is at position " + std::to_string(bad) +
                  "; the decoder covers [0, 100)");
  }
}
TEST_F(DecoderBatchTest, RefusesBlocksOutsideThePool) {
  for (const int32_t bad : {-1, static_cast<int32_t>(harness_->kv().num_blocks)}) {
    std::vector<int32_t> blocks = {0, bad};
    sequences()[1].block_table = blocks.data();
    ExpectRefused("sequence 1 has block " + std::to_string(bad) + " at index 1");
  }
  sequences()[1].block_table = nullptr;
  ExpectRefused("sequence 1 has no blocks");
}
TEST_F(DecoderBatchTest, RefusesLogitsRowsThatDoNotMatch) {
  sequences()[0].logits_row = 2;
  ExpectRefused("wants 1 logits rows from 2 on; there are 2");
  sequences()[0].logits_row = sequences()[1].logits_row;
  ExpectRefused("two sequences want logits row 0");
  sequences()[0].logits_row = -1;
  ExpectRefused("1 rows of logits are wanted; there are 2");
}
TEST_F(DecoderBatchTest, RefusesTokensOutsideTheVocabulary) {
  harness_->tokens()[3] = 131;
  ExpectRefused("token 3 is id 131; it must be in [0, 131)");
}
TEST_F(DecoderBatchTest, GoesOnAfterARefusal) {
  DecoderHarness fresh(*reader_, SmallOptions(2));
  fresh.Add(RandomTokens(100, 131, 0));
  const auto expected = fresh.Step({{0, 4, true}});
  harness_->tokens()[24] = -1;
  ExpectRefused("id -1");
  harness_->tokens()[24] = 0;
  harness_->Run();
  const std::vector<float> row(harness_->logits().begin() + 131, harness_->logits().end());
  EXPECT_EQ(row, expected[0]);
}
TEST_F(DecoderBatchTest, AnEmptyBatchIsNoWork) {
  harness_->batch() = Batch();
  harness_->Run();
  EXPECT_EQ(harness_->arena().used(), 0);
}
TEST_F(DecoderBatchTest, NoLogitsWanted) {
  harness_->Prepare({{0, 4, false}, {1, 20, false}});
  harness_->Run();
  EXPECT_TRUE(harness_->logits().empty());
}
TEST_F(DecoderBatchTest, WritesNothingBeyondItsRows) {
  harness_->logits().resize(3 * 131, -5.0f);
  std::fill(harness_->logits().begin(), harness_->logits().end(), -5.0f);
  harness_->Run();
  for (size_t i = 0; i < 3 * 131; ++i) {
    EXPECT_EQ(harness_->logits()[i] == -5.0f, i >= 2 * 131) << i;
  }
}

// Calls, bytes and operations of two steps, counted here token by token.
TEST(DecoderProfileTest, CountsWhatOperationsReadAndMultiply) {
  proto::DecoderSpec spec = testing::TinyMistralSpec(proto::COMPUTE_FLOAT32);
  const auto reader = OpenRandomModel(spec, 1);
  DecoderHarness harness(*reader, SmallOptions(2));
  const int a = harness.Add(RandomTokens(40, spec.vocab_size(), 1));
  const int b = harness.Add(RandomTokens(40, spec.vocab_size(), 2));
  OpProfile profile;
  const auto step = [&](const std::vector<DecoderHarness::Chunk>& chunks) {
    harness.Prepare(chunks);
    harness.batch().profile = &profile;
    harness.Run();
  };
  step({{a, 20, true}});
  step({{a, 1, true}, {b, 5, false}});
  harness.Step({{a, 1, true}});  // without a profile

  // Per layer: the positions read, and the pairs of a token and a position that it attends to.
  int64_t read = 0, seen = 0;
  for (int64_t window : {17, 1000, 1}) {
    for (const auto& [position, count] : {std::pair{0, 20}, std::pair{20, 1}, std::pair{0, 5}}) {
      std::set<int64_t> positions;
      for (int64_t token = position; token < position + count; ++token) {
        for (int64_t key = std::max<int64_t>(0, token - window + 1); key <= token; ++key) {
          positions.insert(key);
          ++seen;
        }
      }
      read += static_cast<int64_t>(positions.size());
    }
  }
  const int64_t layers = spec.num_layers(), steps = 2, rows = 26;
  const int64_t hidden = spec.hidden_size(), inner = spec.intermediate_size();
  const int64_t heads = spec.num_heads(), kv_heads = spec.num_kv_heads(), dim = spec.head_dim();
  const auto expect = [&](Op op, int64_t calls, int64_t bytes, int64_t operations) {
    const OpTotals totals = profile.Of(op);
    EXPECT_EQ(totals.calls, calls) << OpName(op);
    EXPECT_EQ(totals.bytes, bytes) << OpName(op);
    EXPECT_EQ(totals.operations, operations) << OpName(op);
  };
  const auto expect_linear = [&](Op op, int64_t calls, int64_t n, int64_t k, int64_t all_rows) {
    expect(op, calls, calls * n * k * 4, 2 * n * k * all_rows);
  };
  expect_linear(Op::kQkv, steps * layers, (heads + 2 * kv_heads) * dim, hidden, rows * layers);
  expect_linear(Op::kO, steps * layers, hidden, heads * dim, rows * layers);
  expect_linear(Op::kGateUp, steps * layers, 2 * inner, hidden, rows * layers);
  expect_linear(Op::kDown, steps * layers, hidden, inner, rows * layers);
  expect_linear(Op::kLmHead, steps, spec.vocab_size(), hidden, 2);
  expect(Op::kAttention, steps * layers, 2 * kv_heads * dim * 4 * read, 4 * heads * dim * seen);
  expect(Op::kKvWrite, steps * layers, 0, 0);
  expect(Op::kRope, steps * layers, 0, 0);
  expect(Op::kEmbedding, steps, 0, 0);
  expect(Op::kNorm, steps * (2 * layers + 1), 0, 0);
  expect(Op::kPass, steps, 0, 0);
  EXPECT_EQ(profile.Of(Op::kLinear).calls, 0);
}

// Operations of single model families are counted under names of their own.
TEST(DecoderProfileTest, EveryProductHasAName) {
  std::set<Op> found;
  for (const proto::DecoderSpec& spec : testing::TinySpecs(proto::COMPUTE_BFLOAT16)) {
    const auto reader = OpenRandomModel(spec, 1);
    DecoderHarness harness(*reader, SmallOptions(1));
    const int sequence = harness.Add(RandomTokens(40, spec.vocab_size(), 1));
    OpProfile profile;
    harness.Prepare({{sequence, 20, true}});
    harness.batch().profile = &profile;
    harness.Run();
    EXPECT_EQ(profile.Of(Op::kLinear).calls, 0) << spec.architecture();
    for (size_t op = 0; op < kNumOps; ++op) {
      if (profile.Of(static_cast<Op>(op)).operations > 0) found.insert(static_cast<Op>(op));
    }
  }
  const std::set<Op> products = {
      Op::kQkv,      Op::kLatents, Op::kQ,      Op::kKUp,    Op::kVUp,           Op::kO,
      Op::kGateUp,   Op::kDown,    Op::kRouter, Op::kLmHead, Op::kExpertsGateUp, Op::kExpertsDown,
      Op::kAttention};
  EXPECT_EQ(found, products);
}

}  // namespace
}  // namespace allspark
