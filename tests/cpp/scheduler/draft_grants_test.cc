#include "scheduler/draft_grants.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace allspark {
namespace {

constexpr double kRowCost = 0.03;

std::vector<int64_t> Grant(std::vector<DraftGrant> grants, int64_t max_rows) {
  GrantDrafts(grants, max_rows, kRowCost);
  std::vector<int64_t> granted;
  for (const DraftGrant& grant : grants) granted.push_back(grant.granted);
  return granted;
}

// The expected number of tokens of a step over these decodes, divided by its cost.
double Rate(const std::vector<DraftGrant>& grants, const std::vector<int64_t>& drafts) {
  double tokens = 0, extra = 0;
  auto rows = static_cast<int64_t>(grants.size());
  for (size_t i = 0; i < grants.size(); ++i) {
    for (int64_t d = 0; d <= drafts[i]; ++d) {
      tokens += std::pow(grants[i].acceptance_rate, static_cast<double>(d));
    }
    rows += drafts[i];
    extra += grants[i].cost * static_cast<double>(drafts[i]);
  }
  return tokens / (1 + kRowCost * static_cast<double>(rows - 1) + extra);
}

TEST(DraftGrantsTest, GivesAsManyAsAreWanted) {
  EXPECT_EQ(Grant({{.most = 5}}, 32), (std::vector<int64_t>{5}));
  EXPECT_EQ(Grant({{.most = 50}}, 32), (std::vector<int64_t>{31}));
  EXPECT_EQ(Grant({{.most = 0}}, 32), (std::vector<int64_t>{0}));
  EXPECT_EQ(Grant({{.most = 3}, {.most = 3}}, 2), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(Grant({}, 8), (std::vector<int64_t>{}));
}

TEST(DraftGrantsTest, GivesNoneThatAreNeverRight) {
  EXPECT_EQ(Grant({{.most = 9, .acceptance_rate = 0}}, 32), (std::vector<int64_t>{0}));
  EXPECT_EQ(Grant({{.most = 9, .acceptance_rate = 0.5, .cost = 1}}, 32), (std::vector<int64_t>{0}));
}

TEST(DraftGrantsTest, RisesWithTheChanceAndFallsWithTheCrowd) {
  int64_t last = 0;
  for (double rate : {0.1, 0.3, 0.5, 0.7, 0.9, 0.99}) {
    const int64_t granted = Grant({{.most = 64, .acceptance_rate = rate}}, 64)[0];
    EXPECT_GE(granted, last) << rate;
    last = granted;
  }
  EXPECT_GT(last, 16);
  for (size_t crowd : {1, 2, 4, 8, 16, 32}) {
    const std::vector<DraftGrant> grants(crowd, {.most = 64, .acceptance_rate = 0.7});
    const int64_t granted = Grant(grants, 1024)[0];
    EXPECT_LE(granted, last) << crowd;
    last = granted;
  }
}

TEST(DraftGrantsTest, SharesTheCostOfMakingThem) {
  const DraftGrant likely{.most = 1, .acceptance_rate = 0.7, .cost = 0.4};
  EXPECT_EQ(Grant(std::vector<DraftGrant>(8, likely), 32), std::vector<int64_t>(8, 1));
  // The drafts of one sequence do not pay for their cost if no other sequence has drafts.
  std::vector<DraftGrant> grants(8);
  grants[3] = likely;
  EXPECT_EQ(Grant(grants, 32), std::vector<int64_t>(8, 0));
  // Drafts of another sequence that cost nothing are still granted.
  grants[5] = {.most = 1, .acceptance_rate = 0.7};
  EXPECT_EQ(Grant(grants, 32), (std::vector<int64_t>{0, 0, 0, 0, 0, 1, 0, 0}));
}

// No other choice of up to four drafts each gives more tokens for its cost.
TEST(DraftGrantsTest, IsTheBestChoice) {
  for (double one : {0.05, 0.2, 0.4, 0.6, 0.8, 1.0}) {
    for (double other : {0.1, 0.5, 0.9}) {
      for (double cost : {0.0, 0.1}) {
        const std::vector<DraftGrant> grants = {{.most = 4, .acceptance_rate = one, .cost = cost},
                                                {.most = 4, .acceptance_rate = other},
                                                {.most = 4, .acceptance_rate = 0.3}};
        const double reached = Rate(grants, Grant(grants, 32));
        for (int64_t choice = 0; choice < 125; ++choice) {
          EXPECT_LE(Rate(grants, {choice % 5, choice / 5 % 5, choice / 25}), reached * 1.005)
              << one << " " << other << " " << cost << " choice " << choice;
        }
      }
    }
  }
}

}  // namespace
}  // namespace allspark
