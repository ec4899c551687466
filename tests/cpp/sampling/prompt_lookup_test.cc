#include "sampling/prompt_lookup.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace allspark {
namespace {

using Tokens = std::vector<int32_t>;

Tokens Draft(const Tokens& tokens, int64_t most) {
  const auto found = LookUpDraft(tokens, most);
  return {found.begin(), found.end()};
}

TEST(LookUpDraftTest, TakesWhatFollowedTheLastNgram) {
  EXPECT_EQ(Draft({1, 2, 3, 4, 5, 1, 2}, 3), (Tokens{3, 4, 5}));
  EXPECT_EQ(Draft({1, 2, 3, 4, 5, 1, 2}, 1), (Tokens{3}));
  EXPECT_EQ(Draft({1, 2, 3, 1, 2}, 8), (Tokens{3, 1, 2})) << "up to the end of what is known";
  EXPECT_EQ(Draft({7, 7, 7, 7}, 8), (Tokens{7}));
}

TEST(LookUpDraftTest, PrefersTheLongestMatchThenTheLatest) {
  EXPECT_EQ(Draft({9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2}, 1), (Tokens{5})) << "three tokens match";
  EXPECT_EQ(Draft({1, 2, 5, 1, 2, 6, 0, 1, 2}, 1), (Tokens{6}));
}

TEST(LookUpDraftTest, FindsNothingWhereNothingRepeats) {
  EXPECT_EQ(Draft({}, 4), Tokens{});
  EXPECT_EQ(Draft({1}, 4), Tokens{});
  EXPECT_EQ(Draft({1, 2}, 4), Tokens{});
  EXPECT_EQ(Draft({1, 2, 3, 4}, 4), Tokens{});
  EXPECT_EQ(Draft({1, 2, 3, 2}, 4), Tokens{}) << "one token is too little";
}

// Against a search written from the definition.
TEST(LookUpDraftTest, MatchesTheDefinitionOnRandomTexts) {
  std::mt19937 rng(3);
  for (int round = 0; round < 2000; ++round) {
    Tokens tokens(rng() % 40);
    for (int32_t& token : tokens) token = static_cast<int32_t>(rng() % 4);
    const auto length = static_cast<int64_t>(tokens.size());
    Tokens expected;
    for (int64_t n = kMostNgram; n >= kLeastNgram && expected.empty(); --n) {
      for (int64_t end = length - 1; end >= n && expected.empty(); --end) {
        if (std::equal(tokens.end() - n, tokens.end(), tokens.begin() + end - n)) {
          expected.assign(tokens.begin() + end, tokens.begin() + std::min(length, end + 5));
        }
      }
    }
    ASSERT_EQ(Draft(tokens, 5), expected) << "round " << round;
  }
}

TEST(DraftLengthTest, GrowsWhileDraftsAreRight) {
  DraftLength length(10);
  EXPECT_EQ(length.Next(), 2);
  length.Verified(2, 2);
  EXPECT_EQ(length.Next(), 4);
  length.Verified(4, 4);
  length.Verified(8, 8);
  EXPECT_EQ(length.Next(), 10);
  length.Verified(10, 3);
  EXPECT_EQ(length.Next(), 4);
}

TEST(DraftLengthTest, PausesLongerAndLongerWhileTheyAreWrong) {
  DraftLength length(10);
  for (const int64_t pause : {1, 2, 4, 8, 16, 32, 32}) {
    EXPECT_EQ(length.Next(), 2);
    length.Verified(2, 0);
    for (int64_t i = 0; i < pause; ++i) EXPECT_EQ(length.Next(), 0) << pause;
  }
  EXPECT_EQ(length.Next(), 2);
  length.Verified(2, 1);
  length.Next();
  length.Verified(2, 0);
  EXPECT_EQ(length.Next(), 0);
  EXPECT_EQ(length.Next(), 2) << "one right token forgets the pauses";
}

TEST(DraftLengthTest, NeverDraftsWhereNoneWereAskedFor) {
  DraftLength length(0);
  EXPECT_EQ(length.Next(), 0);
  DraftLength one(1);
  EXPECT_EQ(one.Next(), 1);
  one.Verified(1, 1);
  EXPECT_EQ(one.Next(), 1);
}

}  // namespace
}  // namespace allspark
