#include "allspark/word_matcher.h"

#include <algorithm>

#include "base/check.h"

namespace allspark {

WordMatcher::WordMatcher(std::span<const std::vector<int32_t>> words) {
  using Word = std::span<const int32_t>;
  std::vector<Word> sorted(words.begin(), words.end());
  std::sort(sorted.begin(), sorted.end(), [](const Word& a, const Word& b) {
    return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
  });
  AS_CHECK(sorted.empty() || !sorted.front().empty()) << "a word is empty";

  // Sorted words that begin with the same items are contiguous: a node is a range of words.
  struct Range {
    size_t begin, end;
  };
  std::vector<Range> ranges{{0, sorted.size()}};
  nodes_.resize(1);
  std::vector<bool> is_word{false};
  for (size_t node = 0; node < nodes_.size(); ++node) {
    nodes_[node].first_child = static_cast<int32_t>(nodes_.size());
    auto [begin, end] = ranges[node];
    const auto depth = static_cast<size_t>(nodes_[node].depth);
    while (begin < end && sorted[begin].size() == depth) ++begin;  // the node itself
    while (begin < end) {
      const int32_t item = sorted[begin][depth];
      size_t after = begin;
      while (after < end && sorted[after][depth] == item) ++after;
      nodes_.push_back({.item = item, .depth = static_cast<int32_t>(depth) + 1});
      ranges.push_back({begin, after});
      is_word.push_back(sorted[begin].size() == depth + 1);
      begin = after;
    }
  }
  nodes_.push_back({.first_child = static_cast<int32_t>(nodes_.size())});
  for (size_t node = 0; node < is_word.size(); ++node) {
    if (is_word[node]) nodes_[node].ended = nodes_[node].depth;
  }
  AddLinks();
  AddCompletions(is_word);
}

// Nodes are visited by depth, so the node that a link leads to is complete.
void WordMatcher::AddLinks() {
  for (int32_t node = 0; Index(node) + 1 < nodes_.size(); ++node) {
    for (int32_t child = nodes_[Index(node)].first_child;
         child < nodes_[Index(node) + 1].first_child; ++child) {
      Node& added = nodes_[Index(child)];
      added.link = node == kStart ? kStart : Next(nodes_[Index(node)].link, added.item);
      if (added.ended == 0) added.ended = nodes_[Index(added.link)].ended;
    }
  }
}

void WordMatcher::AddCompletions(const std::vector<bool>& is_word) {
  for (int32_t node = 0; Index(node) + 1 < nodes_.size(); ++node) {
    Node& parent = nodes_[Index(node)];
    parent.first_completion = static_cast<int32_t>(completions_.size());
    for (int32_t child = parent.first_child; child < nodes_[Index(node) + 1].first_child; ++child) {
      const Node& last = nodes_[Index(child)];
      // If a shorter word is a suffix of this word, the item is listed at that word's node, which
      // links lead to.
      if (is_word[Index(child)] && nodes_[Index(last.link)].ended == 0) {
        completions_.push_back(last.item);
      }
    }
    const bool has_any = Index(parent.first_completion) < completions_.size();
    parent.completed = has_any          ? node
                       : node == kStart ? kNone
                                        : nodes_[Index(parent.link)].completed;
  }
  nodes_.back().first_completion = static_cast<int32_t>(completions_.size());
}

int32_t WordMatcher::Next(int32_t state, int32_t item) const {
  while (true) {
    const int32_t child = Child(state, item);
    if (child != kNone) return child;
    if (state == kStart) return kStart;
    state = nodes_[Index(state)].link;
  }
}

int32_t WordMatcher::Child(int32_t node, int32_t item) const {
  const auto begin = nodes_.begin() + nodes_[Index(node)].first_child;
  const auto end = nodes_.begin() + nodes_[Index(node) + 1].first_child;
  const auto found = std::lower_bound(
      begin, end, item, [](const Node& child, int32_t wanted) { return child.item < wanted; });
  if (found == end || found->item != item) return kNone;
  return static_cast<int32_t>(found - nodes_.begin());
}

}  // namespace allspark
