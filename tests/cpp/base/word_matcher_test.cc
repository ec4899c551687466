#include "allspark/word_matcher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "base/check.h"
#include "support/alloc_counter.h"

namespace allspark {
namespace {

using Word = std::vector<int32_t>;

bool EndsWith(const Word& stream, std::span<const int32_t> end) {
  return end.size() <= stream.size() && std::equal(end.rbegin(), end.rend(), stream.rbegin());
}

// Compares every word with the stream.
struct Naive {
  std::vector<Word> words;

  int32_t EndedLength(const Word& stream) const {
    size_t longest = 0;
    for (const Word& word : words) {
      if (EndsWith(stream, word)) longest = std::max(longest, word.size());
    }
    return static_cast<int32_t>(longest);
  }
  int32_t MatchedLength(const Word& stream) const {
    size_t longest = 0;
    for (const Word& word : words) {
      for (size_t length = longest + 1; length <= word.size(); ++length) {
        if (EndsWith(stream, std::span(word).first(length))) longest = length;
      }
    }
    return static_cast<int32_t>(longest);
  }
  std::set<int32_t> Completions(const Word& stream) const {
    std::set<int32_t> items;
    for (const Word& word : words) {
      if (EndsWith(stream, std::span(word).first(word.size() - 1))) items.insert(word.back());
    }
    return items;
  }
};

std::vector<int32_t> Completions(const WordMatcher& matcher, int32_t state) {
  std::vector<int32_t> items;
  matcher.ForEachCompletion(state, [&](int32_t item) { items.push_back(item); });
  return items;
}

TEST(WordMatcher, NoWords) {
  const WordMatcher matcher;
  EXPECT_EQ(matcher.Next(WordMatcher::kStart, 5), WordMatcher::kStart);
  EXPECT_FALSE(matcher.EndsWord(WordMatcher::kStart));
  EXPECT_EQ(Completions(matcher, WordMatcher::kStart), std::vector<int32_t>());
}

TEST(WordMatcher, RefusesAnEmptyWord) {
  const std::vector<Word> words = {{1}, {}};
  EXPECT_THROW(WordMatcher{words}, InternalError);
}

TEST(WordMatcher, FindsWhatComparingEveryWordFinds) {
  std::mt19937 random(3);
  const auto below = [&](int n) {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(n));
  };
  for (int round = 0; round < 3000; ++round) {
    const int num_items = 1 + below(4);
    Naive naive;
    for (int i = below(12); i >= 0; --i) {
      Word word;
      for (int k = below(6); k >= 0; --k) word.push_back(below(num_items) - 1);
      naive.words.push_back(word);
      if (below(4) == 0) naive.words.push_back(word);  // twice
    }
    const WordMatcher matcher(naive.words);
    Word stream;
    int32_t state = WordMatcher::kStart;
    for (int i = 0; i < 40; ++i) {
      const std::vector<int32_t> items = Completions(matcher, state);
      const std::set<int32_t> expected = naive.Completions(stream);
      EXPECT_EQ(std::set<int32_t>(items.begin(), items.end()), expected);
      EXPECT_EQ(items.size(), expected.size()) << "an item twice";
      stream.push_back(below(num_items + 1) - 1);  // also an item that no word has
      state = matcher.Next(state, stream.back());
      EXPECT_EQ(matcher.EndedLength(state), naive.EndedLength(stream));
      EXPECT_EQ(matcher.EndsWord(state), naive.EndedLength(stream) > 0);
      EXPECT_EQ(matcher.MatchedLength(state), naive.MatchedLength(stream));
    }
  }
}

// With this stream and these words, comparing words or their prefixes would take 10^11 steps.
TEST(WordMatcher, ManyWordsCostNoMoreThanFew) {
  std::vector<Word> words;
  for (int32_t size = 1; size < 2000; ++size) {
    words.emplace_back(static_cast<size_t>(size), 7);  // 7, 7 7, 7 7 7, ... each before a 1
    words.back().push_back(1);
  }
  for (int32_t i = 0; i < 200000; ++i) words.push_back({i % 500, 500 + i});
  const WordMatcher matcher(words);
  testing::AllocationCounter counter;
  int64_t num_ended = 0, num_visited = 0;
  {
    testing::AllocationCounter::Scope scope(&counter);
    int32_t state = WordMatcher::kStart;
    for (int32_t i = 0; i < 3000000; ++i) {
      state = matcher.Next(state, i % 2500 == 0 ? 3 : 7);
      num_ended += matcher.EndsWord(state);
    }
    matcher.ForEachCompletion(state, [&](int32_t) { ++num_visited; });
  }
  EXPECT_EQ(num_ended, 0);
  // Item 1, once although two thousand words continue with it, and the second items of 400 words
  // that begin with 7.
  EXPECT_EQ(num_visited, 1 + 400);
  EXPECT_EQ(counter.count(), 0);
}

}  // namespace
}  // namespace allspark
