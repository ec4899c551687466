// WordMatcher: finds many words in a stream at once. A word is a sequence of integers, be it token
// ids or the characters of a text. What one more item of the stream costs does not depend on how
// many words there are.
//
// An automaton (Aho, Corasick 1975). Its state is the longest end of the stream with which a word
// begins; the caller keeps it, so one matcher serves any number of streams. After construction
// nothing changes and nothing allocates: any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace [[gnu::visibility("default")]] allspark {

class WordMatcher {
 public:
  // The state of a stream that begins.
  static constexpr int32_t kStart = 0;

  WordMatcher() : WordMatcher(std::span<const std::vector<int32_t>>()) {}
  // Takes memory and time in proportion to the words' total length, time times its logarithm.
  // Requires: no word is empty, and 2^31 items in all at most.
  explicit WordMatcher(std::span<const std::vector<int32_t>> words);

  // The state after one more item. Over a stream, as many links are followed as it has items.
  int32_t Next(int32_t state, int32_t item) const;
  // Length of the longest end of the stream with which a word begins.
  int32_t MatchedLength(int32_t state) const { return nodes_[Index(state)].depth; }
  // Length of the longest word that ends with the newest item; 0: none does.
  int32_t EndedLength(int32_t state) const { return nodes_[Index(state)].ended; }
  bool EndsWord(int32_t state) const { return EndedLength(state) > 0; }
  // Calls visit(item) for every item that would complete a word, once each.
  template <typename Visit>
  void ForEachCompletion(int32_t state, Visit&& visit) const {
    for (int32_t i = nodes_[Index(state)].completed; i != kNone;
         i = i == kStart ? kNone : nodes_[Index(nodes_[Index(i)].link)].completed) {
      for (int32_t c = nodes_[Index(i)].first_completion; c < nodes_[Index(i) + 1].first_completion;
           ++c) {
        visit(completions_[Index(c)]);
      }
    }
  }

 private:
  static constexpr int32_t kNone = -1;
  // A beginning of words; breadth first, so children of a node follow one another.
  struct Node {
    int32_t item = 0;         // its last one
    int32_t first_child = 0;  // up to that of the next node, in the order of their items
    int32_t link = 0;         // its longest end that is a beginning too
    int32_t depth = 0;        // its length
    int32_t ended = 0;        // length of the longest word that is an end of it
    int32_t completed = 0;    // the nearest node, by links from here on, with completions; or kNone
    int32_t first_completion = 0;  // up to that of the next node
  };
  static size_t Index(int32_t i) { return static_cast<size_t>(i); }
  int32_t Child(int32_t node, int32_t item) const;
  void AddLinks();
  void AddCompletions(const std::vector<bool>& is_word);

  std::vector<Node> nodes_;  // the last one is no node: it ends the lists of the one before
  std::vector<int32_t> completions_;  // of words of which no end is a word
};

}  // namespace allspark
