#include "sampling/suffix_repeats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace allspark {
namespace {

using Text = std::vector<int32_t>;

// What followed earlier occurrences of the last `size` tokens, by comparing all of them.
Text FollowersOf(const Text& text, size_t size) {
  Text followers;
  for (size_t i = 0; i + size < text.size(); ++i) {
    if (std::equal(text.end() - static_cast<int64_t>(size), text.end(),
                   text.begin() + static_cast<int64_t>(i))) {
      followers.push_back(text[i + size]);
    }
  }
  return followers;
}

int64_t OccurrencesOf(const Text& text, size_t begin, size_t size) {
  int64_t count = 0;
  for (size_t i = begin; i + size <= text.size(); ++i) {
    count += std::equal(text.end() - static_cast<int64_t>(size), text.end(),
                        text.begin() + static_cast<int64_t>(i));
  }
  return count;
}

Text Followers(const SuffixRepeats& repeats, const Text& text, int64_t size) {
  Text followers;
  repeats.ForEachFollower(text, size, [&](int32_t token) { followers.push_back(token); });
  return followers;
}

TEST(SuffixRepeatsTest, FindsWhatComparingAllTokensFinds) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    const int32_t num_tokens = 1 + round % 3;
    const size_t prompt = random() % 12;
    Text text;
    const auto grow = [&] { text.push_back(static_cast<int32_t>(random()) % num_tokens); };
    while (text.size() < prompt) grow();
    SuffixRepeats grown(40);
    grown.Start(text);
    while (text.size() < 40) {
      grow();
      for (size_t size = 1; size <= text.size() + 2; ++size) {
        for (const size_t begin : {size_t{0}, prompt}) {
          ASSERT_EQ(grown.CountAfter(text, static_cast<int64_t>(begin), static_cast<int64_t>(size)),
                    size > text.size() ? 0 : OccurrencesOf(text, begin, size));
        }
      }
      grown.Append(text);
      SuffixRepeats anew;
      anew.Start(text);
      for (size_t size = 0; size <= text.size() + 2; ++size) {
        const Text expected = size > text.size() ? Text() : FollowersOf(text, size);
        ASSERT_EQ(Followers(grown, text, static_cast<int64_t>(size)), expected);
        ASSERT_EQ(Followers(anew, text, static_cast<int64_t>(size)), expected);
      }
    }
  }
}

TEST(SuffixRepeatsTest, NothingFollowsInAnEmptyText) {
  SuffixRepeats repeats;
  repeats.Start({});
  EXPECT_TRUE(Followers(repeats, {}, 0).empty());
  EXPECT_TRUE(Followers(repeats, {}, 3).empty());
}

}  // namespace
}  // namespace allspark
