#include "sampling/beam_search.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace allspark {

double SequenceScore(double sum_logprobs, int64_t output_length, double length_penalty) {
  return sum_logprobs / std::pow(static_cast<double>(output_length), length_penalty);
}

BeamSearch::BeamSearch(const BeamSearchParams& params) : params_(params) {
  const auto num_beams = static_cast<size_t>(params.num_beams);
  beams_.reserve(num_beams);
  beams_.push_back({});
  ended_.reserve(num_beams);
  scores_.reserve(num_beams);
  candidates_.reserve(num_beams * static_cast<size_t>(params.num_candidates));
}

void BeamSearch::Advance(std::span<const RowCandidates* const> rows,
                         const std::function<bool(size_t, int32_t)>& ends) {
  Collect(rows);
  ++output_length_;
  beams_.clear();
  ended_.clear();
  const auto num_beams = static_cast<size_t>(params_.num_beams);
  for (size_t rank = 0; rank < candidates_.size(); ++rank) {
    if (rank >= num_beams && beams_.size() == num_beams) break;
    const BeamChoice& choice = candidates_[rank];
    if (!ends(static_cast<size_t>(choice.parent), choice.token)) {
      if (beams_.size() < num_beams) beams_.push_back(choice);
    } else if (rank < num_beams) {
      End(choice);
    }
  }
  done_ = IsDone();
}

void BeamSearch::Collect(std::span<const RowCandidates* const> rows) {
  candidates_.clear();
  for (size_t beam = 0; beam < rows.size(); ++beam) {
    const RowCandidates& row = *rows[beam];
    for (size_t i = 0; i < row.top.size() && row.top[i].token >= 0; ++i) {
      candidates_.push_back({.parent = static_cast<int32_t>(beam),
                             .token = row.top[i].token,
                             .sum_logprobs = beams_[beam].sum_logprobs + row.top[i].logprob,
                             .reported = row.reported[i]});
    }
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const BeamChoice& a, const BeamChoice& b) {
    return std::tuple(-a.sum_logprobs, a.parent, a.token) <
           std::tuple(-b.sum_logprobs, b.parent, b.token);
  });
}

// Sequences that end in one step have one length and come in order, so none displaces another.
void BeamSearch::End(BeamChoice choice) {
  const double score = SequenceScore(choice.sum_logprobs, output_length_, params_.length_penalty);
  choice.place = scores_.size();
  if (static_cast<int64_t>(scores_.size()) < params_.num_beams) {
    scores_.push_back(score);
  } else {
    const auto worst = std::min_element(scores_.begin(), scores_.end());
    if (score <= *worst) return;
    *worst = score;
    choice.place = static_cast<size_t>(worst - scores_.begin());
  }
  ended_.push_back(choice);
}

bool BeamSearch::IsDone() const {
  if (beams_.empty()) return true;
  if (static_cast<int64_t>(scores_.size()) < params_.num_beams) return false;
  if (params_.stop == EarlyStopping::kTrue) return true;
  const bool longest = params_.stop == EarlyStopping::kNever && params_.length_penalty > 0;
  const double best =
      SequenceScore(beams_[0].sum_logprobs, longest ? params_.max_output : output_length_,
                    params_.length_penalty);
  return best <= *std::min_element(scores_.begin(), scores_.end());
}

}  // namespace allspark
