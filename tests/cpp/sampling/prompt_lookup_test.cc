#include "sampling/prompt_lookup.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace allspark {
namespace {

using Tokens = std::vector<int32_t>;

// The drafts for a text that the lookup has not seen before.
Tokens Drafts(const Tokens& tokens, int64_t count) {
  PromptLookup lookup;
  lookup.Follow(tokens);
  Tokens drafts;
  for (int64_t i = 0; lookup.has_draft() && i < count; ++i) {
    drafts.push_back(lookup.Draft(tokens, i));
  }
  return drafts;
}

TEST(PromptLookupTest, DraftsWhatFollowedTheLastTokens) {
  EXPECT_EQ(Drafts({1, 2, 3, 4, 5, 1, 2}, 3), (Tokens{3, 4, 5}));
  EXPECT_EQ(Drafts({1, 2, 3, 2}, 2), (Tokens{3, 2})) << "one token is enough";
}

TEST(PromptLookupTest, GoesRoundInACircle) {
  EXPECT_EQ(Drafts({1, 2, 3, 1, 2}, 8), (Tokens{3, 1, 2, 3, 1, 2, 3, 1}));
  EXPECT_EQ(Drafts({7, 7, 7, 7}, 5), (Tokens{7, 7, 7, 7, 7}));
}

TEST(PromptLookupTest, PrefersTheLongestMatchThenTheLatest) {
  EXPECT_EQ(Drafts({9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2}, 1), (Tokens{5})) << "three tokens match";
  EXPECT_EQ(Drafts({1, 2, 5, 1, 2, 6, 0, 1, 2}, 1), (Tokens{6}));
}

TEST(PromptLookupTest, FindsNothingWhereNothingRepeats) {
  EXPECT_EQ(Drafts({}, 4), Tokens{});
  EXPECT_EQ(Drafts({1}, 4), Tokens{});
  EXPECT_EQ(Drafts({1, 2, 3, 4}, 4), Tokens{});
}

// Against a search written from the definition.
TEST(PromptLookupTest, FindsTheRepeatOfTheDefinition) {
  std::mt19937 rng(3);
  for (int round = 0; round < 2000; ++round) {
    Tokens tokens(rng() % 40);
    for (int32_t& token : tokens) token = static_cast<int32_t>(rng() % 8);
    const auto length = static_cast<int64_t>(tokens.size());
    int64_t expected = 0;
    for (int64_t n = kMostNgram; n >= 1 && expected == 0; --n) {
      for (int64_t end = length - 1; end >= n && expected == 0; --end) {
        if (std::equal(tokens.end() - n, tokens.end(), tokens.begin() + end - n)) {
          expected = length - end;
        }
      }
    }
    ASSERT_EQ(FindRepeat(tokens), expected) << "round " << round;
  }
}

TEST(PromptLookupTest, KeepsToItsSourceWhileThatIsRight) {
  Tokens tokens = {1, 2, 3, 9, 1, 2, 4, 8, 1};
  PromptLookup lookup;
  lookup.Follow(tokens);
  EXPECT_EQ(lookup.Draft(tokens, 0), 2);
  EXPECT_EQ(lookup.Draft(tokens, 1), 4) << "the latest place";
  tokens.push_back(2);
  lookup.Follow(tokens);
  EXPECT_EQ(lookup.Draft(tokens, 0), 4);
  tokens.push_back(3);  // as at the first place
  lookup.Follow(tokens);
  EXPECT_EQ(lookup.Draft(tokens, 0), 9);
}

TEST(PromptLookupTest, LearnsItsChanceFromTheTextAlone) {
  std::mt19937 rng(4);
  Tokens tokens;
  PromptLookup lookup;
  const auto grow = [&](int count, auto&& next) {
    for (int i = 0; i < count; ++i) {
      tokens.push_back(next());
      // Not after every token: a step may append several.
      if (i % 3 == 0) lookup.Follow(tokens);
    }
    lookup.Follow(tokens);
    return lookup.acceptance_rate();
  };
  EXPECT_LT(grow(60, [&] { return static_cast<int32_t>(rng() % 10); }), 0.4);
  EXPECT_GT(grow(60, [&] { return static_cast<int32_t>(tokens.size() % 7); }), 0.95);
  EXPECT_LT(grow(60, [&] { return static_cast<int32_t>(rng() % 10); }), 0.4);
}

}  // namespace
}  // namespace allspark
