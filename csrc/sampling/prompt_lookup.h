// Drafts by prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): the last tokens of a text are
// looked up earlier in it, and what followed them there is proposed to follow again. Plain data of
// one request; the step thread calls it, and nothing allocates.
#pragma once

#include <cstdint>
#include <span>

namespace allspark {

// The tokens that followed the latest earlier occurrence of the last n-gram, at most `most`; empty
// where it has none. The longest n-gram of at most kMostNgram tokens that occurs counts, and one of
// at least kLeastNgram.
inline constexpr int64_t kMostNgram = 4;
inline constexpr int64_t kLeastNgram = 2;
std::span<const int32_t> LookUpDraft(std::span<const int32_t> tokens, int64_t most);

// How many tokens to draft: more while drafts are right, none for a while where they are wrong, so
// that a text without repetition pays for few of them.
class DraftLength {
 public:
  explicit DraftLength(int64_t most = 0) : most_(most), next_(most < kFirst ? most : kFirst) {}

  // Of the step at hand; 0: do not look. Call once a step.
  int64_t Next();
  // What became of a draft that was not empty.
  void Verified(int64_t drafted, int64_t accepted);

 private:
  static constexpr int64_t kFirst = 2;
  static constexpr int64_t kMostPause = 32;  // steps

  int64_t most_;
  int64_t next_;
  int64_t pause_ = 0;       // steps left without a draft
  int64_t next_pause_ = 1;  // after the next draft that is all wrong
};

}  // namespace allspark
