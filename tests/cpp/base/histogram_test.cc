#include "base/histogram.h"

#include <gtest/gtest.h>

#include <thread>

#include "support/alloc_counter.h"

namespace allspark {
namespace {

constexpr double kBounds[] = {0.5, 1, 10};

TEST(HistogramTest, CountsUpToEachBound) {
  Histogram histogram(kBounds);
  EXPECT_EQ(histogram.Cumulated(), (std::vector<int64_t>{0, 0, 0, 0}));
  for (const double value : {0.0, 0.5, 0.75, 1.0, 10.5, 1e9, -1.0}) histogram.Observe(value);
  EXPECT_EQ(histogram.Cumulated(), (std::vector<int64_t>{3, 5, 5, 7}));
  EXPECT_DOUBLE_EQ(histogram.sum(), 0.5 + 0.75 + 1 + 10.5 + 1e9 - 1);
}

TEST(HistogramTest, ObservingAllocatesNothing) {
  Histogram histogram(kBounds);
  testing::AllocationCounter counter;
  counter.Start();
  for (int i = 0; i < 1000; ++i) histogram.Observe(i);
  counter.Stop();
  EXPECT_EQ(counter.count(), 0);
}

TEST(HistogramTest, ReadersSeeCountsThatOnlyGrow) {
  Histogram histogram(kBounds);
  std::thread writer([&] {
    for (int i = 0; i < 20000; ++i) histogram.Observe(i % 12);
  });
  int64_t last = 0;
  while (last < 20000) {
    const std::vector<int64_t> counts = histogram.Cumulated();
    EXPECT_TRUE(std::is_sorted(counts.begin(), counts.end()));
    EXPECT_GE(counts.back(), last);
    last = counts.back();
  }
  writer.join();
}

}  // namespace
}  // namespace allspark
