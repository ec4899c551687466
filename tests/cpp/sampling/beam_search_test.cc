// The rules of a beam search on rows made by hand; tests/python/test_beam_search.py compares whole
// searches with transformers.

#include "sampling/beam_search.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/kernel_table.h"
#include "sampling/host_sampler.h"

namespace allspark {
namespace {

constexpr int32_t kEnd = 9;

RowCandidates Row(std::vector<TokenLogprob> top) {
  RowCandidates row;
  row.reported.resize(top.size());
  row.top = std::move(top);
  return row;
}

bool Ends(size_t, int32_t token) { return token == kEnd; }

BeamSearchParams Params(EarlyStopping stop, double length_penalty = 1) {
  return {.num_beams = 2,
          .num_candidates = 3,
          .max_output = 10,
          .length_penalty = length_penalty,
          .stop = stop};
}

TEST(BeamSearchTest, GoesOnWithTheBestOfAllBeams) {
  BeamSearch search(Params(EarlyStopping::kFalse));
  const RowCandidates first = Row({{3, -1}, {4, -2}, {5, -3}});
  search.Advance(std::vector{&first}, Ends);
  ASSERT_EQ(search.beams().size(), 2u);
  EXPECT_EQ(search.beams()[1].token, 4);
  const RowCandidates a = Row({{6, -5}, {7, -6}, {8, -7}}), b = Row({{6, -1}, {7, -2}, {-1, 0}});
  search.Advance(std::vector{&a, &b}, Ends);
  EXPECT_EQ(search.beams()[0].parent, 1);
  EXPECT_EQ(search.beams()[0].sum_logprobs, -3);
  EXPECT_EQ(search.beams()[1].parent, 1);
  EXPECT_EQ(search.beams()[1].token, 7);
  EXPECT_FALSE(search.done());
}

TEST(BeamSearchTest, EqualOnesAreInOrderOfBeamAndToken) {
  BeamSearch search(Params(EarlyStopping::kFalse));
  const RowCandidates row = Row({{3, -1}, {5, -1}, {4, -1}});
  search.Advance(std::vector{&row}, Ends);
  search.Advance(std::vector{&row, &row}, Ends);
  EXPECT_EQ(search.beams()[0].parent, 0);
  EXPECT_EQ(search.beams()[0].token, 3);
  EXPECT_EQ(search.beams()[1].token, 4);
}

TEST(BeamSearchTest, OnlyTheBestCandidatesCanEnd) {
  BeamSearch search(Params(EarlyStopping::kFalse));
  // Only the best two candidates can end; the end token is third.
  const RowCandidates row = Row({{3, -1}, {4, -2}, {kEnd, -3}});
  search.Advance(std::vector{&row}, Ends);
  EXPECT_TRUE(search.ended().empty());
  EXPECT_EQ(search.beams().size(), 2u);
}

// The state after two sequences ended, one after the other.
BeamSearch AfterTwoEnds(EarlyStopping stop, double length_penalty, float beam) {
  BeamSearch search(Params(stop, length_penalty));
  const RowCandidates first = Row({{kEnd, -1}, {3, -1.5f}, {4, -9}});
  search.Advance(std::vector{&first}, Ends);
  EXPECT_EQ(search.ended().size(), 1u);
  EXPECT_FALSE(search.done());
  const RowCandidates second = Row({{kEnd, -0.5f}, {3, beam}, {4, beam - 1}});
  const RowCandidates none = Row({{-1, 0}, {-1, 0}, {-1, 0}});
  search.Advance(std::vector{&second, &none}, Ends);
  EXPECT_EQ(search.scores().size(), 2u);
  return search;
}

TEST(BeamSearchTest, EndsByItsRule) {
  // Scores are -1 and -2 / 2; the best beam would have (-1.5 + beam) / 2 now.
  EXPECT_TRUE(AfterTwoEnds(EarlyStopping::kTrue, 1, -0.1f).done());
  EXPECT_FALSE(AfterTwoEnds(EarlyStopping::kFalse, 1, -0.1f).done());
  EXPECT_TRUE(AfterTwoEnds(EarlyStopping::kFalse, 1, -1).done());
  // With ten tokens it could score (-1.5 + beam) / 10.
  EXPECT_FALSE(AfterTwoEnds(EarlyStopping::kNever, 1, -1).done());
  EXPECT_TRUE(AfterTwoEnds(EarlyStopping::kNever, 1, -12).done());
  EXPECT_TRUE(AfterTwoEnds(EarlyStopping::kNever, 0, -1).done());
}

TEST(BeamSearchTest, ABetterEndTakesThePlaceOfTheWorst) {
  BeamSearch search = AfterTwoEnds(EarlyStopping::kNever, 1, -0.1f);
  const RowCandidates row = Row({{kEnd, -0.1f}, {3, -1}, {4, -2}});
  search.Advance(std::vector{&row, &row}, Ends);
  ASSERT_EQ(search.ended().size(), 1u);
  EXPECT_EQ(search.ended()[0].place, 0u);
  EXPECT_NEAR(search.scores()[0], -1.7 / 3, 1e-6);
  // No candidate is left to continue with.
  const RowCandidates none = Row({{-1, 0}, {-1, 0}, {-1, 0}});
  search.Advance(std::vector{&none, &none}, Ends);
  EXPECT_TRUE(search.done());
}

TEST(BeamSearchTest, CandidatesAreProcessedLogProbabilities) {
  std::vector<float> logits{1, 3, -INFINITY, 2, NAN};
  const double total = std::log(std::exp(1.0) + std::exp(3.0) + std::exp(2.0));
  const LogitsProcessors processors{.logit_bias = {{0, 5.0f}}};
  const int32_t banned[] = {3};
  RowLogprobs logprobs{.raw = true, .top = std::vector<TokenLogprob>(1)};
  RowCandidates candidates = Row(std::vector<TokenLogprob>(3));
  SamplingRow row{.logits = logits.data(),
                  .edits = {.processors = &processors, .banned = banned},
                  .logprobs = &logprobs,
                  .candidates = &candidates};
  HostSampler sampler(5, *kernels::DefaultTable(), nullptr);
  sampler.Sample(&row, 1);
  EXPECT_EQ(candidates.top[0].token, 0);
  EXPECT_NEAR(candidates.top[0].logprob, 1 - total + 5, 1e-6);
  EXPECT_NEAR(candidates.reported[0], 1 - total, 1e-6);
  EXPECT_EQ(candidates.top[1].token, 1);
  EXPECT_EQ(candidates.top[2].token, -1);
  EXPECT_EQ(logprobs.top[0].token, 1);
  EXPECT_NEAR(logprobs.top[0].logprob, 3 - total, 1e-6);
}

}  // namespace
}  // namespace allspark
