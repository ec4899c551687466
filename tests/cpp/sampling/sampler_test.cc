#include "sampling/host_sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "cpp/sampling/choice_oracle.h"
#include "sampling/philox.h"
#include "support/alloc_counter.h"
#include "support/constants.h"

namespace allspark {
namespace {

using testing::kInf;
using testing::kNan;

class SamplerTest : public ::testing::TestWithParam<const kernels::KernelTable*> {
 protected:
  int32_t SampleOne(std::vector<float> logits, const SamplingParams& params, int64_t position = 0,
                    std::vector<int32_t> banned = {}) {
    HostSampler sampler(static_cast<int64_t>(logits.size()), *GetParam(), nullptr);
    SamplingRow row{.params = &params,
                    .logits = logits.data(),
                    .position = position,
                    .edits = {.banned = banned}};
    sampler.Sample(&row, 1);
    return row.token;
  }
};

INSTANTIATE_TEST_SUITE_P(Tables, SamplerTest, ::testing::ValuesIn(kernels::AvailableTables()),
                         [](const auto& table) { return std::string(table.param->name); });

TEST_P(SamplerTest, GreedyTakesTheLowestIdOfTheHighest) {
  const SamplingParams greedy;
  EXPECT_EQ(SampleOne({1, 5, 2, 5}, greedy), 1);
  EXPECT_EQ(SampleOne({kNan, 1, kNan, 3, 3}, greedy), 3);
  EXPECT_EQ(SampleOne({0, kInf, kNan, kInf}, greedy), 1);
  EXPECT_EQ(SampleOne({-kInf, -1e38f}, greedy), 1);
  std::vector<float> wide(1003, -2.0f);
  wide[777] = wide[778] = wide[1002] = -1.0f;
  EXPECT_EQ(SampleOne(wide, greedy), 777);
}

TEST_P(SamplerTest, NoFiniteLogitGivesMinusOne) {
  for (const bool greedy : {true, false}) {
    const SamplingParams params{.greedy = greedy};
    EXPECT_EQ(SampleOne({kNan, kNan}, params), -1);
    EXPECT_EQ(SampleOne({-kInf, -kInf, -kInf}, params), -1);
    EXPECT_EQ(SampleOne({-kInf, kNan}, params), -1);
    EXPECT_EQ(SampleOne({3, kNan}, params, 0, {0}), -1);
    EXPECT_EQ(SampleOne(std::vector<float>(517, kNan), params), -1);
  }
}

TEST_P(SamplerTest, LowTemperatureIsGreedy) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    // Equal logits: a draw would not always give the first.
    EXPECT_EQ(SampleOne({2, 2, 2}, {.greedy = false, .temperature = 9e-6f, .seed = seed}), 0);
    EXPECT_EQ(SampleOne({2, 2, 2}, {.greedy = false, .temperature = 0, .seed = seed}), 0);
    EXPECT_EQ(SampleOne({2, 2, 2}, {.greedy = false, .temperature = kNan, .seed = seed}), 0);
  }
}

TEST_P(SamplerTest, BannedTokensAreNeverChosen) {
  EXPECT_EQ(SampleOne({1, 5, 4, 3}, {}, 0, {1, 2}), 3);
  EXPECT_EQ(SampleOne({1, kInf, 4, 3}, {}, 0, {1}), 2);
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const int32_t token =
        SampleOne({1, 5, kInf, 1}, {.greedy = false, .top_k = 2, .seed = seed}, 3, {1, 2});
    EXPECT_TRUE(token == 0 || token == 3) << token;
  }
  EXPECT_THROW(SampleOne({1, 2}, {}, 0, {2}), InternalError);
  EXPECT_THROW(SampleOne({1, 2}, {}, 0, {-1}), InternalError);
}

// A mask has the same effect as banning all tokens outside of it, for every length of its last
// word.
TEST_P(SamplerTest, AMaskBansWhatItLeavesOut) {
  std::mt19937 random(17);
  for (const int64_t vocab : {1, 31, 32, 33, 64, 500}) {
    for (uint64_t seed = 0; seed < 60; ++seed) {
      std::vector<float> logits(static_cast<size_t>(vocab));
      for (float& logit : logits) logit = std::normal_distribution<float>(0, 2)(random);
      logits[seed % logits.size()] = seed % 3 == 0 ? kInf : kNan;
      // Some words all on, some all off; bits beyond the vocabulary have no token.
      std::vector<uint32_t> mask(static_cast<size_t>((vocab + 31) / 32));
      for (uint32_t& word : mask) word = seed % 4 == 0 ? 0 : random() % 4 == 0 ? ~0u : random();
      std::vector<int32_t> banned;
      for (int32_t i = 0; i < vocab; ++i) {
        if ((mask[static_cast<size_t>(i / 32)] >> (i % 32) & 1) == 0) banned.push_back(i);
      }
      const SamplingParams params{
          .greedy = seed % 2 == 0, .top_k = 20, .top_p = 0.9f, .seed = seed};
      std::vector<float> masked = logits;
      SamplingRow row{.params = &params, .logits = masked.data(), .mask = mask.data()};
      HostSampler(vocab, *GetParam(), nullptr).Sample(&row, 1);
      EXPECT_EQ(row.token, SampleOne(logits, params, 0, banned)) << vocab << " " << seed;
    }
  }
}

TEST_P(SamplerTest, DrawIsThatOfSeedAndPosition) {
  std::vector<float> logits(97);
  std::mt19937 random(3);
  for (float& logit : logits) logit = std::normal_distribution<float>(0, 2)(random);
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const SamplingParams params{
        .greedy = false, .temperature = 0.9f, .top_k = 30, .top_p = 0.95f, .seed = seed << 30};
    const auto position = static_cast<int64_t>(seed % 7) << 31;
    const auto allowed =
        testing::OracleDraws(logits, {.temperature = 0.9f, .top_k = 30, .top_p = 0.95f},
                             PositionUniform(params.seed, position));
    EXPECT_TRUE(allowed.count(SampleOne(logits, params, position))) << seed;
  }
}

// A batch of rows of all kinds, made again for each run since sampling may overwrite logits.
class Batch {
 public:
  static constexpr int64_t kVocab = 5003;

  explicit Batch(int64_t num_rows) : params_(static_cast<size_t>(num_rows)) {
    std::mt19937 random(99);
    logits_.resize(static_cast<size_t>(num_rows * kVocab));
    for (float& logit : logits_) logit = std::normal_distribution<float>(0, 3)(random);
    for (size_t i = 0; i < params_.size(); ++i) {
      const int32_t top_ks[] = {0, 1, 50, 1500};
      const float top_ps[] = {1.0f, 0.9f, 0.2f};
      params_[i] = {.greedy = i % 5 == 0,
                    .temperature = 0.5f + 0.1f * static_cast<float>(i % 9),
                    .top_k = top_ks[i % 4],
                    .top_p = top_ps[i % 3],
                    .seed = i * 7};
    }
  }

  std::vector<SamplingRow> Rows(std::vector<float>& logits) const {
    logits = logits_;
    std::vector<SamplingRow> rows;
    for (size_t i = 0; i < params_.size(); ++i) {
      rows.push_back({.params = &params_[i],
                      .logits = logits.data() + static_cast<int64_t>(i) * kVocab,
                      .position = static_cast<int64_t>(i),
                      .edits = {.banned = banned_}});
    }
    return rows;
  }

 private:
  std::vector<SamplingParams> params_;
  std::vector<float> logits_;
  int32_t banned_[2] = {0, kVocab - 1};
};

TEST_P(SamplerTest, SameTokensForAnyNumberOfThreadsAndAnyNeighbours) {
  constexpr int64_t kRows = 61;
  const Batch batch(kRows);
  std::vector<float> logits;
  std::vector<SamplingRow> expected = batch.Rows(logits);
  HostSampler alone(Batch::kVocab, *GetParam(), nullptr);
  for (SamplingRow& row : expected) alone.Sample(&row, 1);  // One row at a time.
  for (const int num_threads : {1, 2, 3, 8}) {
    ThreadPool pool(num_threads, /*pin=*/false);
    HostSampler sampler(Batch::kVocab, *GetParam(), &pool);
    std::vector<SamplingRow> rows = batch.Rows(logits);
    std::reverse(rows.begin(), rows.end());
    sampler.Sample(rows.data(), kRows);
    std::reverse(rows.begin(), rows.end());
    for (size_t i = 0; i < rows.size(); ++i) {
      ASSERT_EQ(rows[i].token, expected[i].token) << num_threads << " threads, row " << i;
    }
  }
}

TEST_P(SamplerTest, SamplingAllocatesNothing) {
  const Batch batch(24);
  ThreadPool pool(2, /*pin=*/false);
  for (ThreadPool* use : {static_cast<ThreadPool*>(nullptr), &pool}) {
    HostSampler sampler(Batch::kVocab, *GetParam(), use);
    std::vector<float> logits;
    std::vector<SamplingRow> rows = batch.Rows(logits);
    testing::AllocationCounter counter;
    {
      testing::AllocationCounter::Scope scope(&counter);
      sampler.Sample(rows.data(), static_cast<int64_t>(rows.size()));
    }
    EXPECT_EQ(counter.count(), 0);
  }
}

TEST_P(SamplerTest, NoRowsIsNothing) {
  ThreadPool pool(2, /*pin=*/false);
  HostSampler(10, *GetParam(), &pool).Sample(nullptr, 0);
  HostSampler(10, *GetParam(), nullptr).Sample(nullptr, 0);
}

TEST(SamplerConstruction, RefusesWhatCannotWork) {
  const kernels::KernelTable& table = *kernels::AvailableTables().front();
  EXPECT_THROW(HostSampler(0, table, nullptr), InternalError);
  const kernels::KernelTable empty;
  EXPECT_THROW(HostSampler(10, empty, nullptr), InternalError);
}

}  // namespace
}  // namespace allspark
