// Which rows of a tensor have been added, as disjoint ranges. Private to weights/. One thread at a
// time.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace allspark::weights {

class RowCoverage {
 public:
  using Range = std::pair<int64_t, int64_t>;  // [begin, end)

  explicit RowCoverage(int64_t num_rows) : num_rows_(num_rows) {}

  // The first added range that shares a row with [begin, end), or an empty range.
  Range FindOverlap(int64_t begin, int64_t end) const;
  // Requires: no overlap, 0 <= begin < end <= num_rows.
  void Add(int64_t begin, int64_t end);
  bool complete() const {
    return ranges_.size() == 1 && ranges_.begin()->first == 0 &&
           ranges_.begin()->second == num_rows_;
  }
  // In ascending order.
  std::vector<Range> Missing() const;

 private:
  int64_t num_rows_;
  std::map<int64_t, int64_t> ranges_;  // begin -> end; adjacent ranges are merged
};

}  // namespace allspark::weights
