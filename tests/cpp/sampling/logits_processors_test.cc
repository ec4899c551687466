#include "sampling/logit_edits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>
#include <tuple>

#include "base/check.h"
#include "support/alloc_counter.h"
#include "support/constants.h"

namespace allspark {
namespace {

using testing::kInf;

TEST(TokenCounts, CountsAsAMapDoes) {
  std::mt19937 random(5);
  for (int64_t max_distinct : {1, 2, 100, 1000}) {
    TokenCounts counts(max_distinct);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < max_distinct; ++i) ids.push_back(static_cast<int32_t>(random() >> 1));
    std::map<int32_t, int32_t> expected;
    testing::AllocationCounter counter;
    for (int i = 0; i < 5000; ++i) {
      const int32_t token = ids[random() % ids.size()];
      const bool is_output = random() % 3 > 0;
      expected[token] += is_output;
      testing::AllocationCounter::Scope scope(&counter);
      counts.Add(token, is_output);
    }
    EXPECT_EQ(counter.count(), 0);
    std::map<int32_t, int32_t> actual;
    for (const auto& [token, num_output] : counts.entries()) actual[token] = num_output;
    EXPECT_EQ(actual, expected);
    EXPECT_EQ(counts.entries().size(), expected.size()) << "a token twice";
  }
}

TEST(TokenCounts, RefusesMoreThanItHolds) {
  TokenCounts counts(1);
  counts.Add(7, true);
  counts.Add(7, false);
  EXPECT_THROW(counts.Add(8, true), InternalError);
}

std::vector<float> Apply(const LogitsProcessors& processors, std::vector<int32_t> prompt,
                         const std::vector<int32_t>& output, std::vector<float> logits) {
  TokenCounts counts(20);
  for (int32_t token : prompt) counts.Add(token, false);
  for (int32_t token : output) counts.Add(token, true);
  prompt.insert(prompt.end(), output.begin(), output.end());
  int32_t state = WordMatcher::kStart;
  if (processors.bad_words != nullptr) {
    for (int32_t token : prompt) state = processors.bad_words->Next(state, token);
  }
  SuffixRepeats repeats;
  repeats.Start(prompt);
  const RowEdits edits{.processors = &processors,
                       .tokens = prompt,
                       .counts = &counts,
                       .repeats = &repeats,
                       .bad_word_state = state};
  edits.ForEach([&](const LogitEdit& edit) {
    float& logit = logits.at(static_cast<size_t>(edit.token));
    logit = edit.Of(logit);
  });
  return logits;
}

TEST(LogitsProcessors, NothingAskedForIsNothingDone) {
  EXPECT_FALSE(LogitsProcessors().Any());
  EXPECT_FALSE(LogitsProcessors{.repetition_in_output_only = true}.Any());
}

TEST(LogitsProcessors, Penalties) {
  const LogitsProcessors repetition{.repetition_penalty = 2};
  EXPECT_EQ(Apply(repetition, {0}, {1, 1}, {4, -4, 4}), (std::vector<float>{2, -8, 4}));
  const LogitsProcessors output_only{.repetition_penalty = 2, .repetition_in_output_only = true};
  EXPECT_EQ(Apply(output_only, {0}, {1, 1}, {4, -4, 4}), (std::vector<float>{4, -8, 4}));
  const LogitsProcessors counted{.frequency_penalty = 0.5, .presence_penalty = -1};
  EXPECT_EQ(Apply(counted, {0}, {1, 1, 2}, {4, 4, 4}), (std::vector<float>{4, 4, 4.5}));
}

TEST(LogitsProcessors, BiasComesBeforeThePenalty) {
  const LogitsProcessors both{.logit_bias = {{1, -3}}, .repetition_penalty = 2};
  EXPECT_EQ(Apply(both, {1}, {}, {0, 1}), (std::vector<float>{0, -4}));
}

TEST(LogitsProcessors, Bans) {
  const LogitsProcessors bigrams{.no_repeat_ngram_size = 2};
  EXPECT_EQ(Apply(bigrams, {1, 2, 1, 3}, {1}, {0, 0, 0, 0}),
            (std::vector<float>{0, 0, -kInf, -kInf}));
  const LogitsProcessors unigrams{.no_repeat_ngram_size = 1};
  EXPECT_EQ(Apply(unigrams, {1}, {2}, {0, 0, 0, 0}), (std::vector<float>{0, -kInf, -kInf, 0}));
  const LogitsProcessors long_ngrams{.no_repeat_ngram_size = 9};
  EXPECT_EQ(Apply(long_ngrams, {1}, {1}, {0, 0}), (std::vector<float>{0, 0}));
  const std::vector<std::vector<int32_t>> bad_words = {{0}, {1, 2, 3}, {2, 1}, {1, 1, 1, 1, 1, 2}};
  const LogitsProcessors words{.bad_words = std::make_shared<WordMatcher>(bad_words)};
  EXPECT_EQ(Apply(words, {1}, {2}, {0, 0, 0, 0}), (std::vector<float>{-kInf, -kInf, 0, -kInf}));
}

TEST(RowEdits, ComeInOrderAndBanLast) {
  const std::vector<std::vector<int32_t>> bad_words = {{5}};
  const LogitsProcessors all{.logit_bias = {{1, 7}},
                             .repetition_penalty = 2,
                             .frequency_penalty = 0.5,
                             .presence_penalty = 0.25,
                             .no_repeat_ngram_size = 2,
                             .bad_words = std::make_shared<WordMatcher>(bad_words)};
  const std::vector<int32_t> tokens = {1, 3, 1}, banned = {2, 4};
  TokenCounts counts(9);
  counts.Add(1, false), counts.Add(3, true), counts.Add(1, true);
  SuffixRepeats repeats;
  repeats.Start(tokens);
  const RowEdits edits{.processors = &all,
                       .tokens = tokens,
                       .counts = &counts,
                       .repeats = &repeats,
                       .banned = banned};
  using Kind = LogitEdit::Kind;
  using Listed = std::tuple<int32_t, Kind, float>;
  std::vector<Listed> listed;
  edits.ForEach(
      [&](const LogitEdit& edit) { listed.emplace_back(edit.token, edit.kind, edit.value); });
  const Listed expected[] = {{1, Kind::kAdd, 7},     {1, Kind::kPenalize, 2}, {1, Kind::kAdd, -0.5},
                             {1, Kind::kAdd, -0.25}, {3, Kind::kPenalize, 2}, {3, Kind::kAdd, -0.5},
                             {3, Kind::kAdd, -0.25}, {3, Kind::kBan, 0},      {5, Kind::kBan, 0},
                             {2, Kind::kBan, 0},     {4, Kind::kBan, 0}};
  EXPECT_TRUE(std::equal(listed.begin(), listed.end(), std::begin(expected), std::end(expected)));
  // A ban holds whatever the logit is.
  for (const float logit : {0.0f, kInf, -kInf, std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_EQ((LogitEdit{.token = 1}).Of(logit), -kInf);
  }
}

}  // namespace
}  // namespace allspark
