// WordMatcher: finds many words in a stream at once. A word is a sequence of integers, be it token
// ids or the characters of a text. The cost of an item of the stream hardly depends on the number
// of words: a binary search among the items that continue a word.
//
// An Aho-Corasick automaton (1975). Its state is the longest suffix of the stream that is a prefix
// of a word; the caller keeps the state, so one matcher serves any number of streams. After
// construction nothing changes and nothing allocates: any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace [[gnu::visibility("default")]] allspark {

class WordMatcher {
 public:
  // The state at the beginning of a stream.
  static constexpr int32_t kStart = 0;

  WordMatcher() : WordMatcher(std::span<const std::vector<int32_t>>()) {}
  // Takes memory and time in proportion to the words' total length, time times its logarithm.
  // Requires: no word is empty, and 2^31 items in all at most.
  explicit WordMatcher(std::span<const std::vector<int32_t>> words);

  // The state after one more item. Over a whole stream, at most one link per item is followed.
  int32_t Next(int32_t state, int32_t item) const;
  // Length of the longest suffix of the stream that is a prefix of a word.
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
  // A prefix of words. Nodes are stored breadth first, so the children of a node are contiguous.
  struct Node {
    int32_t item = 0;              // the last of the prefix
    int32_t first_child = 0;       // children end at the next node's first, in order of items
    int32_t link = 0;              // the longest proper suffix that is a node too
    int32_t depth = 0;             // length of the prefix
    int32_t ended = 0;             // length of the longest word that is a suffix of the prefix
    int32_t completed = 0;         // the first node with completions, from here by links; or kNone
    int32_t first_completion = 0;  // completions end at the next node's first
  };
  static size_t Index(int32_t i) { return static_cast<size_t>(i); }
  int32_t Child(int32_t node, int32_t item) const;
  void AddLinks();
  void AddCompletions(const std::vector<bool>& is_word);

  std::vector<Node> nodes_;  // the last one is a sentinel: it ends the lists of the one before
  std::vector<int32_t> completions_;  // of words that no shorter word is a suffix of
};

}  // namespace allspark
