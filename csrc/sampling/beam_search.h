// Chooses the beams of a beam search: scores, ends and the stop rule, as transformers'
// generate(num_beams) has them. Plain data of one request, no tokens but the chosen ones; the step
// thread calls it, and nothing allocates after construction.
//
// A step takes the likeliest continuations of every beam. Of the num_beams best, those that end a
// sequence compete for the num_beams places of ended sequences. The best of the other continuations
// are the next beams. A sequence's score is the sum of its log-probabilities /
// length^length_penalty, where length is that of the output.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "allspark/choices.h"
#include "sampling/logprobs.h"

namespace allspark {

double SequenceScore(double sum_logprobs, int64_t output_length, double length_penalty);

struct BeamSearchParams {
  int64_t num_beams = 1;
  int64_t num_candidates = 1;  // of a row: num_beams and one for each token that may end a sequence
  int64_t max_output = 1;
  double length_penalty = 1;
  EarlyStopping stop = EarlyStopping::kFalse;
};

struct BeamChoice {
  int32_t parent = 0;  // the beam that is continued
  int32_t token = 0;
  double sum_logprobs = 0;
  float reported = 0;  // RowCandidates::reported
  size_t place = 0;    // of an ended sequence
};

class BeamSearch {
 public:
  explicit BeamSearch(const BeamSearchParams& params);

  // One step: rows[i] are the candidates of beam i, `ends(beam, token)` tells whether its sequence
  // would end with the token. At first there is one beam.
  void Advance(std::span<const RowCandidates* const> rows,
               const std::function<bool(size_t, int32_t)>& ends);
  // Results of the step: the next beams, best first, and sequences that ended and have a place
  // among the best.
  std::span<const BeamChoice> beams() const { return beams_; }
  std::span<const BeamChoice> ended() const { return ended_; }
  bool done() const { return done_; }
  // The scores of the ended sequences by place.
  std::span<const double> scores() const { return scores_; }

 private:
  void Collect(std::span<const RowCandidates* const> rows);
  void End(BeamChoice choice);
  bool IsDone() const;

  BeamSearchParams params_;
  int64_t output_length_ = 0;
  bool done_ = false;
  std::vector<BeamChoice> beams_, ended_, candidates_;
  std::vector<double> scores_;
};

}  // namespace allspark
