// Routing and the sum of experts of every table against the reference.
#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "cpp/kernels/kernel_test_util.h"

namespace allspark::kernels {
namespace {

class MoeTest : public KernelTest {};

struct RouteCase {
  int64_t rows, experts, top_k;
  RouteArgs args{};
  std::vector<float> logits, bias, weights;
  std::vector<int32_t> chosen;

  RouteCase(int64_t r, int64_t n, int64_t k, uint32_t seed) : rows(r), experts(n), top_k(k) {
    Data data(seed);
    logits = data.Vector<float>(rows * (n + 3) + 1, 2.0f);
    bias = data.Vector<float>(n + 1, 0.3f);
    args.ldx = n + 3;
    args.rows = rows;
    args.num_experts = n;
    args.top_k = k;
    args.scale = 1.0f;
    args.groups = args.used_groups = 1;
  }
  int64_t columns() const { return top_k + (args.has_shared ? 1 : 0); }
  void Run(const KernelTable& table, int64_t row = 0, int64_t count = -1) {
    weights.assign(static_cast<size_t>(rows * columns() + 1), -7.0f);
    chosen.assign(static_cast<size_t>(rows * top_k + 1), -7);
    args.logits = logits.data() + 1 + row * args.ldx;
    args.experts = chosen.data() + row * top_k;
    args.weights = weights.data() + row * columns();
    args.rows = count < 0 ? rows : count;
    table.route(args);
  }
  double Logit(int64_t row, int64_t i) const {
    return static_cast<double>(logits[static_cast<size_t>(1 + row * args.ldx + i)]);
  }
  // The value by which experts are ranked.
  double Choice(int64_t row, int64_t i) const {
    double s = Logit(row, i);
    if (args.score == RouterScore::kSigmoid) {
      s = 1 / (1 + std::exp(-s));
    } else if (args.bias != nullptr) {
      double sum = 0;
      for (int64_t j = 0; j < experts; ++j) sum += std::exp(Logit(row, j));
      s = std::exp(s) / sum;
    }
    return s + (args.bias == nullptr ? 0.0 : static_cast<double>(args.bias[i]));
  }
};

// The error of an exponential of the distance to the highest logit, and of sums. The exponential
// turns the rounding of that distance into a relative error.
double WeightBound(const RouteCase& c, double expected) {
  constexpr double kHighestLogit = 16;
  return testing::Gamma(32 + 8 * kHighestLogit + static_cast<double>(c.experts)) *
             std::fabs(expected) +
         testing::kFloatTiny;
}

void ExpectLikeReference(const KernelTable& table, RouteCase c) {
  RouteCase expected = c;
  expected.Run(Reference());
  c.Run(table);
  for (int64_t r = 0; r < c.rows; ++r) {
    std::set<int32_t> distinct;
    for (int64_t j = 0; j < c.top_k; ++j) {
      const auto at = static_cast<size_t>(r * c.top_k + j);
      ASSERT_GE(c.chosen[at], 0);
      ASSERT_LT(c.chosen[at], c.experts);
      distinct.insert(c.chosen[at]);
      // Another expert is allowed only if both rank equally within rounding.
      const double got = c.Choice(r, c.chosen[at]), best = c.Choice(r, expected.chosen[at]);
      const bool exact = c.args.score == RouterScore::kSoftmax && c.args.bias == nullptr;
      ASSERT_NEAR(got, best, exact ? 0 : WeightBound(c, 1.0)) << "row " << r << " choice " << j;
    }
    ASSERT_EQ(static_cast<int64_t>(distinct.size()), c.top_k) << "row " << r;
    for (int64_t j = 0; j < c.columns(); ++j) {
      const auto at = static_cast<size_t>(r * c.columns() + j);
      const double want = static_cast<double>(expected.weights[at]);
      ASSERT_NEAR(static_cast<double>(c.weights[at]), want, WeightBound(c, want) * 2)
          << "row " << r << " weight " << j << " of " << c.experts << " experts";
    }
  }
  EXPECT_EQ(c.weights.back(), -7.0f);
  EXPECT_EQ(c.chosen.back(), -7);
}

TEST_P(MoeTest, Route) {
  for (const int64_t experts : {1, 2, 7, 8, 9, 16, 17, 60, 61, 64, 128, 160, 257, 1024}) {
    for (const int64_t top_k : {1, 2, 4, 6, 8, 32}) {
      if (top_k > experts) continue;
      for (int variant = 0; variant < 16; ++variant) {
        RouteCase c(3, experts, top_k, static_cast<uint32_t>(experts * 37 + top_k));
        if ((variant & 1) != 0) c.args.score = RouterScore::kSigmoid;
        c.args.normalize = (variant & 2) != 0;
        if ((variant & 4) != 0) c.args.bias = c.bias.data() + 1;
        c.args.has_shared = (variant & 8) != 0;
        c.args.shared_gate = c.args.has_shared && (variant & 1) != 0;
        c.args.scale = (variant & 4) != 0 ? 2.5f : 1.0f;
        ExpectLikeReference(table(), c);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(MoeTest, RouteWithinGroups) {
  for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    for (const int64_t groups : {2, 4, 8, 32}) {
      for (const int64_t size : {1, 2, 5, 32}) {
        RouteCase c(5, groups * size, 1, static_cast<uint32_t>(groups * 100 + size));
        c.args.score = score;
        c.args.groups = groups;
        c.args.used_groups = groups / 2;
        c.top_k = c.args.top_k = std::min<int64_t>(groups / 2 * size, 8);
        if (score == RouterScore::kSigmoid) c.args.bias = c.bias.data() + 1;
        ExpectLikeReference(table(), c);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(MoeTest, EqualExpertsAreTakenInOrder) {
  RouteCase c(1, 20, 6, 1);
  std::fill(c.logits.begin(), c.logits.end(), 0.25f);
  c.logits[1 + 13] = 1.0f;
  c.Run(table());
  c.chosen.pop_back();
  EXPECT_EQ(c.chosen, (std::vector<int32_t>{13, 0, 1, 2, 3, 4}));
  c.args.groups = 4;
  c.args.used_groups = 2;
  c.Run(table());
  c.chosen.pop_back();
  EXPECT_EQ(c.chosen, (std::vector<int32_t>{13, 0, 1, 2, 3, 4}));
}

// For any logits the chosen experts are valid, memory stays safe, and other rows do not change.
TEST_P(MoeTest, NoNumberIsChosenLast) {
  for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    for (const int64_t groups : {1, 3}) {
      RouteCase c(2, 9, 3, 5);
      c.args.score = score;
      c.args.groups = groups;
      c.args.used_groups = 1;
      RouteCase alone = c;
      for (int64_t i = 0; i < 9; ++i) {
        c.logits[static_cast<size_t>(1 + i)] = i % 2 == 0 ? kNan : -kInf;
      }
      c.Run(table());
      alone.Run(table());
      const std::set<int32_t> distinct(c.chosen.begin(), c.chosen.begin() + 3);
      EXPECT_EQ(distinct.size(), 3u);
      for (const int32_t id : distinct) EXPECT_TRUE(id >= 0 && id < 9) << id;
      for (size_t j = 3; j < 6; ++j) {
        EXPECT_EQ(c.chosen[j], alone.chosen[j]);
        EXPECT_EQ(c.weights[j], alone.weights[j]);
      }
    }
  }
  RouteCase c(1, 4, 2, 5);
  c.logits = {0, kNan, 1, kNan, 2};
  c.Run(table());
  EXPECT_EQ(c.chosen[0], 3);
  EXPECT_EQ(c.chosen[1], 1);
}

TEST_P(MoeTest, ARowIsRoutedAlone) {
  RouteCase all(7, 61, 4, 9);
  all.args.normalize = true;
  all.args.has_shared = all.args.shared_gate = true;
  RouteCase one = all;
  all.Run(table());
  for (int64_t r = 0; r < all.rows; ++r) {
    one.Run(table(), r, 1);
    const auto at = static_cast<size_t>(r * all.columns());
    EXPECT_TRUE(SameBits(&all.weights[at], &one.weights[at], all.columns())) << "row " << r;
  }
}

struct CombineCase {
  int64_t rows, cols, sources, ldx, ldy;
  std::vector<float> x, weights, y;
  std::vector<int32_t> from;

  CombineCase(int64_t r, int64_t c, int64_t n)
      : rows(r), cols(c), sources(n), ldx(c + 3), ldy(c + 5) {
    Data data(static_cast<uint32_t>(c * 7 + n));
    x = data.Vector<float>(rows * sources * ldx + 1);
    weights = data.Vector<float>(rows * sources);
    y = data.Vector<float>(rows * ldy + 1);
    for (int64_t i = 0; i < rows * sources; ++i) {
      from.push_back(static_cast<int32_t>(data.Below(rows * sources)));
    }
  }
  std::vector<float> Run(const KernelTable& table, bool accumulate) const {
    std::vector<float> out = y;
    table.combine({x.data() + 1, ldx, from.data(), weights.data(), sources, out.data() + 1, ldy,
                   rows, cols, accumulate});
    return out;
  }
};

TEST_P(MoeTest, Combine) {
  for (const int64_t cols : {1, 7, 8, 9, 16, 17, 64, 130, 1031}) {
    for (const int64_t sources : {1, 2, 5, 9, 33}) {
      for (const bool accumulate : {false, true}) {
        const CombineCase c(3, cols, sources);
        const std::vector<float> expected = c.Run(Reference(), accumulate);
        const std::vector<float> got = c.Run(table(), accumulate);
        for (int64_t r = 0; r < c.rows; ++r) {
          for (int64_t i = 0; i < c.ldy; ++i) {
            const auto at = static_cast<size_t>(1 + r * c.ldy + i);
            if (at >= got.size()) break;
            double magnitude = std::fabs(static_cast<double>(c.y[at]));
            for (int64_t j = 0; j < sources && i < cols; ++j) {
              const auto s = static_cast<size_t>(r * sources + j);
              const auto element = static_cast<size_t>(1 + c.from[s] * c.ldx + i);
              magnitude += std::fabs(static_cast<double>(c.weights[s] * c.x[element]));
            }
            const double bound = i < cols ? testing::DotBound(sources + 1, magnitude) : 0;
            ASSERT_NEAR(static_cast<double>(got[at]), static_cast<double>(expected[at]), bound)
                << "cols=" << cols << " sources=" << sources << " row " << r << " column " << i;
          }
        }
      }
    }
  }
}

AS_INSTANTIATE_KERNEL_TEST(MoeTest);

}  // namespace
}  // namespace allspark::kernels
