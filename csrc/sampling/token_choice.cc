#include "sampling/token_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace allspark {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The order of the distribution; total, since ids differ.
bool Before(const TokenCandidate& a, const TokenCandidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// The k-th highest logit, -inf where fewer than k are above that. Keeps a pool of the best, cut to
// k by selection whenever it is full: linear for any order of the logits, and after the first few
// thousand almost every logit costs one comparison. scratch: [vocab_size].
float KthHighest(const float* logits, int64_t vocab_size, int64_t k, TokenCandidate* scratch) {
  // A pool much larger than k makes the selections rare; one much larger than the caches would not
  // pay.
  const int64_t pool_size = std::min(vocab_size, std::max<int64_t>(2 * k, 1024));
  const auto higher = [](const TokenCandidate& a, const TokenCandidate& b) {
    return a.logit > b.logit;
  };
  float floor = -kInfinity;
  int64_t count = 0;
  for (int64_t i = 0; i < vocab_size; ++i) {
    if (!(logits[i] > floor)) continue;  // NaN too.
    scratch[count++] = {logits[i], static_cast<int32_t>(i)};
    if (count == pool_size) {
      std::nth_element(scratch, scratch + (k - 1), scratch + count, higher);
      count = k;
      floor = scratch[k - 1].logit;
    }
  }
  if (count < k) return -kInfinity;
  std::nth_element(scratch, scratch + (k - 1), scratch + count, higher);
  return scratch[k - 1].logit;
}

// Collects the tokens with logit >= lowest, in order of id. Returns how many.
int64_t Collect(const float* logits, int64_t vocab_size, float lowest, TokenCandidate* out) {
  int64_t count = 0;
  for (int64_t i = 0; i < vocab_size; ++i) {
    if (!(logits[i] >= lowest)) continue;
    out[count++] = {logits[i], static_cast<int32_t>(i)};
  }
  return count;
}

// Weights, and a division of the logits into buckets of descending value. The bucket of a token is
// a function of its logit that never rises with it, so all of one bucket come before all of the
// next.
class Distribution {
 public:
  static constexpr int kNumBuckets = 1024;

  Distribution(const TokenCandidate* tokens, int64_t count, double temperature)
      : temperature_(temperature) {
    float max = tokens[0].logit, min = tokens[0].logit;
    for (int64_t i = 1; i < count; ++i) {
      max = std::max(max, tokens[i].logit);
      min = std::min(min, tokens[i].logit);
    }
    max_ = max;
    // Buckets reach down to the lowest logit, but at most 64 temperatures (e^-64 is 1e-28):
    // otherwise the tokens that matter could fall into a few buckets.
    const double range = std::min(max_ - min, 64 * temperature);
    scale_ = range > 0 ? kNumBuckets / range : 0;
  }

  double Weight(float logit) const { return std::exp((logit - max_) / temperature_); }
  int Bucket(float logit) const {
    return static_cast<int>(std::min((max_ - logit) * scale_, double{kNumBuckets - 1}));
  }

 private:
  double temperature_;
  double max_;
  double scale_;
};

struct Cut {
  int64_t index = 0;  // of the last token before the cut
  double before = 0;  // the weight before that token
  double weight = 0;  // its own
};

// Orders tokens[0, count) so far that the shortest prefix (by Before) whose weight reaches `goal`
// is in front, and returns the last token of that prefix. A sum reaches the goal if it is >= or,
// with `strictly`, >. If rounding keeps the sum below the goal, it returns the last token with any
// weight. Halves the range by selection instead of sorting: linear in count.
Cut FindCut(const Distribution& distribution, TokenCandidate* tokens, int64_t count, double goal,
            bool strictly) {
  const auto reaches = [=](double sum) { return strictly ? sum > goal : sum >= goal; };
  constexpr int64_t kSortedCount = 128;
  int64_t begin = 0, end = count;
  double before = 0;
  while (end - begin > kSortedCount) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(tokens + begin, tokens + middle, tokens + end, Before);
    double sum = before;
    for (int64_t i = begin; i < middle; ++i) sum += distribution.Weight(tokens[i].logit);
    // A part without weight has nothing to cut; stay in the half that has weight.
    if (reaches(sum) || distribution.Weight(tokens[middle].logit) == 0) {
      end = middle;
    } else {
      begin = middle;
      before = sum;
    }
  }
  std::sort(tokens + begin, tokens + end, Before);
  Cut cut{begin, before, distribution.Weight(tokens[begin].logit)};
  while (!reaches(cut.before + cut.weight) && cut.index + 1 < end) {
    const double next = distribution.Weight(tokens[cut.index + 1].logit);
    if (next == 0) break;
    cut = {cut.index + 1, cut.before + cut.weight, next};
  }
  return cut;
}

// The same for many tokens. The sums of the buckets show which bucket holds the cut. Only that
// bucket is moved to the front of the array and put in order; the cut's index counts from there.
class BucketedTokens {
 public:
  BucketedTokens(const Distribution& distribution, TokenCandidate* tokens, int64_t count)
      : distribution_(distribution), tokens_(tokens), count_(count) {
    for (int64_t i = 0; i < count; ++i) {
      sums_[distribution.Bucket(tokens[i].logit)] += distribution.Weight(tokens[i].logit);
    }
    for (double sum : sums_) total_ += sum;
  }

  double total() const { return total_; }

  Cut Find(double goal, bool strictly) {
    int bucket = 0;  // The last with weight, where rounding keeps the sum below the goal.
    double before = 0, sum = 0;
    for (int b = 0; b < Distribution::kNumBuckets; ++b) {
      if (sums_[b] == 0) continue;
      bucket = b;
      before = sum;
      sum += sums_[b];
      if (strictly ? sum > goal : sum >= goal) break;
    }
    TokenCandidate* const end = std::partition(
        tokens_, tokens_ + count_,
        [&](const TokenCandidate& t) { return distribution_.Bucket(t.logit) == bucket; });
    Cut cut = FindCut(distribution_, tokens_, end - tokens_, goal - before, strictly);
    cut.before += before;
    return cut;
  }

 private:
  const Distribution& distribution_;
  TokenCandidate* tokens_;
  int64_t count_;
  double sums_[Distribution::kNumBuckets] = {};
  double total_ = 0;
};

}  // namespace

int32_t ChooseToken(const float* logits, int64_t vocab_size, const TokenFilter& filter,
                    double uniform, TokenCandidate* scratch) {
  float lowest = -std::numeric_limits<float>::max();
  if (filter.top_k > 0 && filter.top_k < vocab_size) {
    lowest = std::max(lowest, KthHighest(logits, vocab_size, filter.top_k, scratch));
  }
  int64_t count = Collect(logits, vocab_size, lowest, scratch);
  if (count == 0) return -1;
  TokenCandidate* const infinite_end = std::partition(
      scratch, scratch + count, [](const TokenCandidate& t) { return t.logit == kInfinity; });
  if (infinite_end != scratch) {
    count = infinite_end - scratch;
    for (int64_t i = 0; i < count; ++i) scratch[i].logit = 0;
  }

  const Distribution distribution(scratch, count, filter.temperature);
  if (filter.top_p < 1) {
    BucketedTokens tokens(distribution, scratch, count);
    const Cut cut = tokens.Find(filter.top_p * tokens.total(), /*strictly=*/false);
    const TokenCandidate last = scratch[cut.index];
    if (distribution.Weight(last.logit) >= filter.min_p) {
      const double kept = cut.before + cut.weight;
      const TokenCandidate drawn = scratch[tokens.Find(uniform * kept, /*strictly=*/true).index];
      // The second search sums in another order: rounding could carry it beyond the first one's
      // cut.
      return Before(last, drawn) ? last.id : drawn.id;
    }
    // All that min_p keeps is before that cut.
  }
  if (filter.min_p > 0) {
    count = std::partition(scratch, scratch + count,
                           [&](const TokenCandidate& t) {
                             return distribution.Weight(t.logit) >= filter.min_p;
                           }) -
            scratch;
  }
  BucketedTokens tokens(distribution, scratch, count);
  return scratch[tokens.Find(uniform * tokens.total(), /*strictly=*/true).index].id;
}

}  // namespace allspark
